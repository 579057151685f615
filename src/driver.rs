//! libcuda, opened at run time: what a process sees of the GPUs. The only file with `unsafe`.
//!
//! `cuInit` may block for ever on a broken control daemon and makes its process an MPS client, so the product calls
//! `look` only in a child process of its own, with a deadline (`look_in_child`).

#![allow(unsafe_code)]

use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::path::Path;
use std::time::Duration;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cli::{LOOK_COMMAND, THROUGH_DAEMON};
use crate::gpu::GpuUuid;
use crate::host::Host;
use crate::runner::{Invocation, Mode, RunError, Status};

/// `CUresult`: 0 is success. An `enum` would be undefined behaviour with a newer driver's code.
type CuResult = u32;
/// `CUdevice`, an ordinal.
type CuDevice = c_int;
/// `CUuuid`.
type CuUuid = [u8; 16];
/// `CUcontext`.
type CuContext = *mut c_void;

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT` of cuda.h.
const MULTIPROCESSOR_COUNT: c_int = 16;

/// Why the driver shows nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum DriverFailure {
    /// There is no libcuda.
    #[error("the CUDA driver cannot be opened: {0}")]
    NotOpened(String),
    /// It lacks a function that every driver of the last ten years has.
    #[error("the CUDA driver has no {0}")]
    TooOld(String),
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
    TimedOut(u64),
    /// The child failed in a way of its own.
    #[error("the look at the CUDA driver failed: {0}")]
    Child(String),
}

/// What a process sees through the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// The CUDA version that the driver supports, 12040 for 12.4.
    pub driver_version: i32,
    /// The devices, in the process's own order.
    pub devices: Vec<Device>,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its UUID.
    pub uuid: GpuUuid,
    /// Its multiprocessors, as many as this process may use.
    pub multiprocessors: i32,
    /// Bytes that could be allocated; known only with a context.
    pub free_memory: Option<u64>,
    /// Bytes of the device; known only with a context.
    pub total_memory: Option<u64>,
}

struct Driver(Library);

impl Driver {
    fn open() -> Result<Self, DriverFailure> {
        // SAFETY: loading runs libcuda's initialisers, which NVIDIA means to be run in any process.
        let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) };
        library.map(Self).map_err(|error| {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            DriverFailure::NotOpened(source.unwrap_or_else(|| error.to_string()))
        })
    }

    /// The function `name`. `F` must be its type in cuda.h.
    fn function<F: Copy>(&self, name: &'static str) -> Result<F, DriverFailure> {
        // SAFETY: each caller names the signature that cuda.h has had for this exported symbol since CUDA 4; the copied
        // pointer is used only while `self` keeps the library open.
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

    fn count(&self) -> Result<c_int, DriverFailure> {
        type Count = unsafe extern "C" fn(*mut c_int) -> CuResult;
        let function = self.function::<Count>("cuDeviceGetCount")?;
        let mut count = 0;
        // SAFETY: `count` is a valid place for an int.
        self.check("cuDeviceGetCount", unsafe { function(&raw mut count) })?;
        Ok(count)
    }

    fn device(&self, ordinal: c_int, with_context: bool) -> Result<Device, DriverFailure> {
        type Get = unsafe extern "C" fn(*mut CuDevice, c_int) -> CuResult;
        type Uuid = unsafe extern "C" fn(*mut CuUuid, CuDevice) -> CuResult;
        type Attribute = unsafe extern "C" fn(*mut c_int, c_int, CuDevice) -> CuResult;
        let get = self.function::<Get>("cuDeviceGet")?;
        let uuid_of = self.function::<Uuid>("cuDeviceGetUuid")?;
        let attribute = self.function::<Attribute>("cuDeviceGetAttribute")?;
        let mut device = 0;
        // SAFETY: `device` is a valid place, and the ordinal is below the count.
        self.check("cuDeviceGet", unsafe { get(&raw mut device, ordinal) })?;
        let mut uuid = [0; 16];
        // SAFETY: a CUuuid is 16 bytes, and `device` came from cuDeviceGet.
        self.check("cuDeviceGetUuid", unsafe { uuid_of(&raw mut uuid, device) })?;
        let mut multiprocessors = 0;
        // SAFETY: `multiprocessors` is a valid place for an int.
        let code = unsafe { attribute(&raw mut multiprocessors, MULTIPROCESSOR_COUNT, device) };
        self.check("cuDeviceGetAttribute", code)?;
        let memory = match with_context {
            true => Some(self.memory(device)?),
            false => None,
        };
        Ok(Device {
            uuid: uuid_text(uuid)?,
            multiprocessors,
            free_memory: memory.map(|(free, _)| free),
            total_memory: memory.map(|(_, total)| total),
        })
    }

    /// Free and total bytes of a device, asked in its primary context.
    fn memory(&self, device: CuDevice) -> Result<(u64, u64), DriverFailure> {
        type Retain = unsafe extern "C" fn(*mut CuContext, CuDevice) -> CuResult;
        type SetCurrent = unsafe extern "C" fn(CuContext) -> CuResult;
        type Info = unsafe extern "C" fn(*mut usize, *mut usize) -> CuResult;
        let retain = self.function::<Retain>("cuDevicePrimaryCtxRetain")?;
        let set_current = self.function::<SetCurrent>("cuCtxSetCurrent")?;
        let info = self.function::<Info>("cuMemGetInfo_v2")?;
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is a valid place. The context is not released: the process ends right after the look.
        self.check("cuDevicePrimaryCtxRetain", unsafe {
            retain(&raw mut context, device)
        })?;
        // SAFETY: `context` was retained just now.
        self.check("cuCtxSetCurrent", unsafe { set_current(context) })?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid places for a size_t, and a context is current.
        self.check("cuMemGetInfo", unsafe {
            info(&raw mut free, &raw mut total)
        })?;
        Ok((free as u64, total as u64))
    }
}

fn uuid_text(bytes: CuUuid) -> Result<GpuUuid, DriverFailure> {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{digits}")
        .parse()
        .map_err(|error: crate::gpu::UuidError| DriverFailure::Child(error.to_string()))
}

/// Initialises CUDA in this process and says what is there. With a context, memory is known and a control daemon
/// counts this process among its clients.
pub fn look(with_context: bool) -> Result<Seen, DriverFailure> {
    let driver = Driver::open()?;
    let driver_version = driver.version()?;
    driver.init()?;
    let devices = (0..driver.count()?)
        .map(|ordinal| driver.device(ordinal, with_context))
        .collect::<Result<_, _>>()?;
    Ok(Seen {
        driver_version,
        devices,
    })
}

/// What a process saw that went through a control daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The devices, with their memory.
    pub seen: Seen,
    /// The server that counts the process among its clients.
    pub server: Option<i32>,
}

/// Where no control daemon is, so that a child does not become an MPS client.
const NOWHERE: &str = "/nonexistent";

/// Has a child of ours look, with the caller's environment and, if given, another mask. Not through a control daemon.
pub fn look_in_child(
    host: &Host,
    mask: Option<&str>,
    limit: Duration,
) -> Result<Seen, DriverFailure> {
    in_child(host, mask, NOWHERE.as_ref(), &[LOOK_COMMAND], limit)
}

/// Has a child of ours initialise CUDA on `gpu` through the daemon in `pipe` and look for itself among the clients.
pub fn probe_in_child(
    host: &Host,
    gpu: &GpuUuid,
    pipe: &Path,
    limit: Duration,
) -> Result<Probe, DriverFailure> {
    let args = [LOOK_COMMAND, THROUGH_DAEMON];
    in_child(host, Some(gpu.as_str()), pipe, &args, limit)
}

/// Calls our own binary, which prints a `Result<T, DriverFailure>`.
fn in_child<T: DeserializeOwned>(
    host: &Host,
    mask: Option<&str>,
    pipe: &Path,
    args: &[&str],
    limit: Duration,
) -> Result<T, DriverFailure> {
    let replaced = |key: &OsString| {
        key == "CUDA_MPS_PIPE_DIRECTORY" || (key == "CUDA_VISIBLE_DEVICES" && mask.is_some())
    };
    let mut env: Vec<(OsString, OsString)> = host
        .env
        .all()
        .filter(|(key, _)| !replaced(key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    env.push(("CUDA_MPS_PIPE_DIRECTORY".into(), pipe.into()));
    env.extend(mask.map(|mask| ("CUDA_VISIBLE_DEVICES".into(), mask.into())));
    let call = Invocation {
        purpose: "look at the CUDA driver",
        program: host.ourselves.clone(),
        args: args.iter().map(OsString::from).collect(),
        env,
        stdin: Vec::new(),
        mode: Mode::Captured(limit),
    };
    let failed = |reason: String| Err(DriverFailure::Child(reason));
    match host.runner.run(&call) {
        Ok(finished) if finished.status == Status::Exited(0) => {
            serde_json::from_str::<Result<T, DriverFailure>>(&finished.stdout)
                .unwrap_or_else(|error| failed(error.to_string()))
        }
        Ok(finished) => failed(format!("{:?}, {}", finished.status, finished.said())),
        Err(RunError::TimedOut(limit)) => Err(DriverFailure::TimedOut(limit.as_secs())),
        Err(error) => failed(error.to_string()),
    }
}
