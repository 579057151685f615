//! Which CPUs the processes on a GPU use, so that those on one GPU and those on the next keep out of each other's way
//! without talking. Pure: it sees one gathered [`Machine`] and nothing else.
//!
//! Each GPU of the machine, whether the caller may use it or not, has cores of its own: one for its first worker from
//! the bottom of its NUMA node, one for its service from the top, and its turn of those between. Every process that
//! has the same mask finds the same ones.

mod machine;
mod places;
mod plan;
mod set;

pub use machine::{HostGpu, Machine, Quota};
pub use places::{Home, Place, places, unplaced};
pub use plan::{CpuPlan, Kind, PlanError, Setting, Worker, plan};
pub use set::{CpuSet, CpuSetError};
