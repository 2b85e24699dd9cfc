//! The rubelet program.

fn main() {}
