//! A stand-in for libcuda.so.1, as much of it as `src/driver.rs` calls. Compiled by itself, as a `cdylib`.
//!
//! `STUB_GPUS` names a file in the form of nvidia-smi's rows; `CUDA_VISIBLE_DEVICES` is honoured for indices and
//! complete UUIDs. `STUB_CUDA` makes it misbehave: `hang` in cuInit, a number that cuInit returns, or `wrong-uuid`.
//! Compiled with `--cfg too_old` it lacks a function.

use std::ffi::{c_char, c_int, c_void};
use std::time::Duration;

fn conduct() -> String {
    std::env::var("STUB_CUDA").unwrap_or_default()
}

/// The 32 digits of each visible device.
fn devices() -> Vec<String> {
    let file = std::env::var("STUB_GPUS").unwrap_or_default();
    let rows = std::fs::read_to_string(file).unwrap_or_default();
    let digits = |uuid: &str| uuid.replace("GPU-", "").replace('-', "").to_lowercase();
    let all: Vec<String> = rows
        .lines()
        .filter_map(|row| row.split(',').nth(1))
        .map(|uuid| digits(uuid.trim()))
        .filter(|digits| digits.len() == 32)
        .collect();
    let Ok(mask) = std::env::var("CUDA_VISIBLE_DEVICES") else {
        return all;
    };
    mask.split(',')
        .map_while(|entry| match entry.trim().parse::<usize>() {
            Ok(index) => all.get(index).cloned(),
            Err(_) => all.iter().find(|known| **known == digits(entry.trim())).cloned(),
        })
        .collect()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: u32) -> u32 {
    match conduct().as_str() {
        "hang" => loop {
            std::thread::sleep(Duration::from_secs(60));
        },
        code => code.parse().unwrap_or(if devices().is_empty() { 100 } else { 0 }),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: *mut c_int) -> u32 {
    unsafe { *version = 12040 };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: *mut c_int) -> u32 {
    unsafe { *count = devices().len() as c_int };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> u32 {
    unsafe { *device = ordinal };
    0
}

#[cfg(not(too_old))]
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> u32 {
    let mut digits = devices()[device as usize].clone();
    if conduct() == "wrong-uuid" {
        digits.replace_range(..2, "ff");
    }
    for (place, byte) in (0..16).enumerate() {
        let value = u8::from_str_radix(&digits[2 * byte..2 * byte + 2], 16).unwrap_or(0);
        unsafe { (*uuid)[place] = value };
    }
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(value: *mut c_int, _attribute: c_int, _device: c_int) -> u32 {
    unsafe { *value = 132 };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, _device: c_int) -> u32 {
    unsafe { *context = context.cast() };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(_context: *mut c_void) -> u32 {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32 {
    unsafe {
        *free = 70 << 30;
        *total = 80 << 30;
    }
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(code: u32, name: *mut *const c_char) -> u32 {
    let text = match code {
        100 => c"CUDA_ERROR_NO_DEVICE",
        805 => c"CUDA_ERROR_MPS_CONNECTION_FAILED",
        _ => c"CUDA_ERROR_UNKNOWN",
    };
    unsafe { *name = text.as_ptr() };
    0
}
