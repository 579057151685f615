//! libcuda, opened at run time: what a process sees of the GPUs, and the checkpoint of another process. The only files
//! with `unsafe`.
//!
//! A call may block for ever, and `cuInit` makes its process a client of a control daemon that it finds. So the product
//! calls libcuda only in a child process of its own, with a deadline (`child`).

#![allow(unsafe_code)]

mod checkpoint;
mod child;
mod look;

use std::ffi::{CStr, c_char, c_int};
use std::mem::ManuallyDrop;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use serde::{Deserialize, Serialize};

pub use checkpoint::Checkpointer;
pub use child::{Caller, Probe, look_in_child, probe_in_child};
pub use look::{Device, Seen, look};

/// `CUresult`: 0 is success. An `enum` would be undefined behaviour with a newer driver's code.
type CuResult = u32;
/// `CUuuid`.
type CuUuid = [u8; 16];

/// Why the driver shows nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum DriverFailure {
    /// There is no libcuda.
    #[error("the CUDA driver cannot be opened: {0}")]
    NotOpened(String),
    /// It lacks a function that every driver of the last ten years has.
    #[error("the CUDA driver has no {0}")]
    TooOld(String),
    /// It is older than what is asked of it.
    #[error("{0}")]
    Outdated(String),
    /// A call failed.
    #[error("{call} failed with CUDA error {code} ({name})")]
    Call {
        /// The function.
        call: String,
        /// The number.
        code: u32,
        /// CUDA's name for it.
        name: String,
    },
    /// The child did not come back in time.
    #[error("the CUDA driver did not answer within {0} s")]
    TimedOut(f64),
    /// We were asked to end by this signal; the child was ended.
    #[error("interrupted by signal {0}")]
    Interrupted(i32),
    /// The child failed in a way of its own.
    #[error("the child process that calls the CUDA driver failed: {0}")]
    Child(String),
}

/// The library stays loaded: threads of it may run for as long as the process does.
struct Driver(ManuallyDrop<Library>);

impl Driver {
    fn open() -> Result<Self, DriverFailure> {
        // SAFETY: loading runs libcuda's initialisers, which NVIDIA means to be run in any process.
        let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) };
        library
            .map(|library| Self(ManuallyDrop::new(library)))
            .map_err(|error| {
                let source = std::error::Error::source(&error).map(ToString::to_string);
                DriverFailure::NotOpened(source.unwrap_or_else(|| error.to_string()))
            })
    }

    /// The function `name`. `F` must be its type in cuda.h.
    fn function<F: Copy>(&self, name: &'static str) -> Result<F, DriverFailure> {
        // SAFETY: each caller names the signature that cuda.h has had for this exported symbol from its beginning; the
        // library is never closed.
        unsafe { self.0.get::<F>(name.as_bytes()) }
            .map(|symbol| *symbol)
            .map_err(|_| DriverFailure::TooOld(name.to_owned()))
    }

    fn check(&self, call: &'static str, code: CuResult) -> Result<(), DriverFailure> {
        if code == 0 {
            return Ok(());
        }
        Err(DriverFailure::Call {
            call: call.to_owned(),
            code,
            name: self.error_name(code),
        })
    }

    fn error_name(&self, code: CuResult) -> String {
        type Name = unsafe extern "C" fn(CuResult, *mut *const c_char) -> CuResult;
        let Ok(function) = self.function::<Name>("cuGetErrorName") else {
            return "unknown".to_owned();
        };
        let mut name = std::ptr::null();
        // SAFETY: `name` is a valid place for a pointer; on success it points to a string of static life.
        if unsafe { function(code, &raw mut name) } != 0 || name.is_null() {
            return "unknown".to_owned();
        }
        // SAFETY: not null, and NUL-terminated by the function's contract.
        unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned()
    }

    fn init(&self) -> Result<(), DriverFailure> {
        type Init = unsafe extern "C" fn(u32) -> CuResult;
        let init = self.function::<Init>("cuInit")?;
        // SAFETY: the only valid flags are 0.
        self.check("cuInit", unsafe { init(0) })
    }

    fn version(&self) -> Result<i32, DriverFailure> {
        type Version = unsafe extern "C" fn(*mut c_int) -> CuResult;
        let function = self.function::<Version>("cuDriverGetVersion")?;
        let mut version = 0;
        // SAFETY: `version` is a valid place for an int.
        self.check("cuDriverGetVersion", unsafe { function(&raw mut version) })?;
        Ok(version)
    }
}
