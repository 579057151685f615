//! What a process sees of the GPUs.

use std::ffi::{c_int, c_void};

use serde::{Deserialize, Serialize};

use super::{CuResult, CuUuid, Driver, DriverFailure};
use crate::gpu::GpuUuid;

/// `CUdevice`, an ordinal.
type CuDevice = c_int;
/// `CUcontext`.
type CuContext = *mut c_void;

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT` of cuda.h.
const MULTIPROCESSOR_COUNT: c_int = 16;

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

impl Driver {
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
