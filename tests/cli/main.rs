//! The real binary on machines of its own, with stand-ins for NVIDIA's programs; one file a command. A test that shows
//! a scenario of the Python command has the scenario's id as its name.

#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod args;
mod bound;
mod checkpoint;
mod checks;
mod clients;
mod comfort;
mod cost;
mod cpus;
mod directories;
mod doctor;
mod drain;
mod dry_run;
mod engine;
mod env;
mod env_choice;
mod env_forms;
mod exclusive;
mod limits;
mod load;
mod logs;
mod mig;
mod per_node;
mod prune;
mod races;
mod records;
mod require_mps;
mod run;
mod run_on_a_terminal;
mod several_gpus;
mod start;
mod status;
mod stop;
mod terminal;
mod users;
mod validate;
mod wait;
mod watch;
