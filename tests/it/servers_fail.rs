crate::tests![];
