//! The commands, one file each.

pub mod demo;
pub mod init;
pub mod run;
pub mod skip;
