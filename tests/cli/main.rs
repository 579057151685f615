//! The real binary on machines of its own, with stand-ins for NVIDIA's programs; one file a command. A test that shows
//! a scenario of the Python command has the scenario's id as its name.

#[path = "../support/mod.rs"]
mod support;

mod env;
mod records;
mod start;
