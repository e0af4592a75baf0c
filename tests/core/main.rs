//! Tests of the pure core from outside, without servers: real pgoutput bytes of five PostgreSQL
//! versions, and histories of any shape against a naive model.

mod golden;
mod histories;
mod wire;
