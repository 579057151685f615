//! A small CUDA program, which is the test binary itself: it fills buffers on the first GPU and obeys the lines of its
//! standard input with one line each, until there are no more.
//!
//! ```text
//! step      steps every number once; sum CHECKSUM
//! spin N    says spinning, keeps the GPU busy for N seconds, and answers as to step
//! uuid      GPU-…, which the driver says it is on
//! memory    free and total bytes of the GPU
//! exit      bye
//! ```
//!
//! Where CUDA fails, it says error, what and why, and ends.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::io::{BufRead, Write};
use std::process::ExitCode;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::pattern::{self, BUFFERS, LENGTH};

/// With this variable, a seed, the test binary is the program.
pub(crate) const VARIABLE: &str = "UNI_CUMPS_GPU_PROGRAM";
/// What it says when its buffers are filled.
pub(crate) const READY: &str = "ready";
/// What it says when the GPU has got the work that takes long.
pub(crate) const SPINNING: &str = "spinning";

/// The threads of a block.
const WIDTH: u32 = 256;

/// The seed, where we are to be the program.
pub(crate) fn asked() -> Option<u32> {
    std::env::var(VARIABLE).ok()?.parse().ok()
}

/// How a checksum is said.
pub(crate) fn sum_text(sum: u64) -> String {
    format!("sum {sum:016x}")
}

pub(crate) fn run(seed: u32) -> ExitCode {
    // A test that is killed takes its programs along.
    let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL);
    match Work::begin(seed).and_then(|mut work| work.obey()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            let _ = say(&format!("error: {reason}"));
            ExitCode::FAILURE
        }
    }
}

fn say(line: &str) -> Result<(), String> {
    let mut stdout = std::io::stdout().lock();
    let said = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
    said.map_err(|error| error.to_string())
}

/// `CUresult`, `CUdevice`, `CUdeviceptr`, and the handles, which are pointers.
type CuResult = u32;
type CuDevice = c_int;
type CuDevicePtr = u64;
type CuHandle = *mut c_void;

/// libcuda, initialised, with a context on the first GPU.
struct Cuda {
    library: Library,
    device: CuDevice,
}

impl Cuda {
    fn open() -> Result<Self, String> {
        // SAFETY: loading runs libcuda's initialisers, which NVIDIA means to be run in any process.
        let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) };
        let mut cuda = Self {
            library: library.map_err(|error| error.to_string())?,
            device: 0,
        };
        let init: unsafe extern "C" fn(c_uint) -> CuResult = cuda.function("cuInit")?;
        // SAFETY: the only valid flags are 0.
        cuda.check("cuInit", unsafe { init(0) })?;
        let get: unsafe extern "C" fn(*mut CuDevice, c_int) -> CuResult =
            cuda.function("cuDeviceGet")?;
        let mut device = 0;
        // SAFETY: `device` is a valid place; where there is no GPU 0 the call says so.
        cuda.check("cuDeviceGet", unsafe { get(&raw mut device, 0) })?;
        cuda.device = device;
        let retain: unsafe extern "C" fn(*mut CuHandle, CuDevice) -> CuResult =
            cuda.function("cuDevicePrimaryCtxRetain")?;
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is a valid place, and `device` came from cuDeviceGet. It is kept until the process ends.
        cuda.check("cuDevicePrimaryCtxRetain", unsafe {
            retain(&raw mut context, device)
        })?;
        let set_current: unsafe extern "C" fn(CuHandle) -> CuResult =
            cuda.function("cuCtxSetCurrent")?;
        // SAFETY: `context` was retained just now. This is the only thread that calls CUDA.
        cuda.check("cuCtxSetCurrent", unsafe { set_current(context) })?;
        Ok(cuda)
    }

    /// The function `name`. `F` must be its type in cuda.h.
    fn function<F: Copy>(&self, name: &str) -> Result<F, String> {
        // SAFETY: each caller names the signature that cuda.h has for this exported symbol; the copied pointer is used only
        // while `self` keeps the library open.
        let symbol = unsafe { self.library.get::<F>(name.as_bytes()) };
        symbol
            .map(|symbol| *symbol)
            .map_err(|_| format!("the driver has no {name}"))
    }

    fn check(&self, call: &str, code: CuResult) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let mut name: *const c_char = std::ptr::null();
        let function = self
            .function::<unsafe extern "C" fn(CuResult, *mut *const c_char) -> CuResult>(
                "cuGetErrorName",
            );
        // SAFETY: `name` is a valid place for a pointer.
        let known = function.is_ok_and(|function| unsafe { function(code, &raw mut name) } == 0);
        let name = match known && !name.is_null() {
            // SAFETY: not null, and on success a NUL-terminated string of static life.
            true => unsafe { CStr::from_ptr(name) }.to_string_lossy(),
            false => "unknown".into(),
        };
        Err(format!("{call} failed with {code} ({name})"))
    }

    fn allocate(&self, bytes: usize) -> Result<CuDevicePtr, String> {
        let allocate: unsafe extern "C" fn(*mut CuDevicePtr, usize) -> CuResult =
            self.function("cuMemAlloc_v2")?;
        let mut place = 0;
        // SAFETY: `place` is a valid place, and a context is current.
        self.check("cuMemAlloc", unsafe { allocate(&raw mut place, bytes) })?;
        Ok(place)
    }

    fn upload(&self, to: CuDevicePtr, numbers: &[u32]) -> Result<(), String> {
        let copy: unsafe extern "C" fn(CuDevicePtr, *const c_void, usize) -> CuResult =
            self.function("cuMemcpyHtoD_v2")?;
        // SAFETY: the buffer at `to` has as many bytes as `numbers`, and the call returns when they are read.
        self.check("cuMemcpyHtoD", unsafe {
            copy(to, numbers.as_ptr().cast(), size_of_val(numbers))
        })
    }

    fn download(&self, from: CuDevicePtr, numbers: &mut [u32]) -> Result<(), String> {
        let copy: unsafe extern "C" fn(*mut c_void, CuDevicePtr, usize) -> CuResult =
            self.function("cuMemcpyDtoH_v2")?;
        // SAFETY: the buffer at `from` has as many bytes as `numbers`, any bits are a u32, and the call returns when they
        // are written.
        self.check("cuMemcpyDtoH", unsafe {
            copy(numbers.as_mut_ptr().cast(), from, size_of_val(numbers))
        })
    }

    fn load(&self, text: &str) -> Result<CuHandle, String> {
        let load: unsafe extern "C" fn(*mut CuHandle, *const c_void) -> CuResult =
            self.function("cuModuleLoadData")?;
        let text = CString::new(text).map_err(|error| error.to_string())?;
        let mut module = std::ptr::null_mut();
        // SAFETY: `module` is a valid place, and the text is PTX that ends with a NUL.
        self.check("cuModuleLoadData", unsafe {
            load(&raw mut module, text.as_ptr().cast())
        })?;
        Ok(module)
    }

    fn kernel(&self, module: CuHandle, name: &CStr) -> Result<CuHandle, String> {
        let get: unsafe extern "C" fn(*mut CuHandle, CuHandle, *const c_char) -> CuResult =
            self.function("cuModuleGetFunction")?;
        let mut kernel = std::ptr::null_mut();
        // SAFETY: `kernel` is a valid place, and `module` was loaded and is never unloaded.
        self.check("cuModuleGetFunction", unsafe {
            get(&raw mut kernel, module, name.as_ptr())
        })?;
        Ok(kernel)
    }

    /// Launches a kernel in the default stream. Each argument points to a value of the type that the kernel declares.
    fn launch(
        &self,
        kernel: CuHandle,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<(), String> {
        type Launch = unsafe extern "C" fn(
            CuHandle,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            CuHandle,
            *mut *mut c_void,
            *mut *mut c_void,
        ) -> CuResult;
        let launch: Launch = self.function("cuLaunchKernel")?;
        let none = std::ptr::null_mut();
        let values = arguments.as_mut_ptr();
        // SAFETY: `kernel` belongs to a loaded module, its arguments are as many and as large as its PTX says, and the
        // call copies them before it returns.
        self.check("cuLaunchKernel", unsafe {
            launch(
                kernel,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                none,
                values,
                std::ptr::null_mut(),
            )
        })
    }

    fn synchronise(&self) -> Result<(), String> {
        let synchronise: unsafe extern "C" fn() -> CuResult = self.function("cuCtxSynchronize")?;
        // SAFETY: a context is current.
        self.check("cuCtxSynchronize", unsafe { synchronise() })
    }

    fn uuid(&self) -> Result<String, String> {
        let get: unsafe extern "C" fn(*mut [u8; 16], CuDevice) -> CuResult =
            self.function("cuDeviceGetUuid")?;
        let mut uuid = [0; 16];
        // SAFETY: a CUuuid is 16 bytes, and the device came from cuDeviceGet.
        self.check("cuDeviceGetUuid", unsafe {
            get(&raw mut uuid, self.device)
        })?;
        let mut text = "GPU-".to_owned();
        for (at, byte) in uuid.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                text.push('-');
            }
            text.push_str(&format!("{byte:02x}"));
        }
        Ok(text)
    }

    fn memory(&self) -> Result<(usize, usize), String> {
        let info: unsafe extern "C" fn(*mut usize, *mut usize) -> CuResult =
            self.function("cuMemGetInfo_v2")?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid places for a size_t, and a context is current.
        self.check("cuMemGetInfo", unsafe {
            info(&raw mut free, &raw mut total)
        })?;
        Ok((free, total))
    }
}

/// The program with its buffers and kernels.
struct Work {
    cuda: Cuda,
    step: CuHandle,
    spin: CuHandle,
    buffers: Vec<CuDevicePtr>,
    /// As long as a buffer, for what comes back.
    numbers: Vec<u32>,
}

impl Work {
    fn begin(seed: u32) -> Result<Self, String> {
        let cuda = Cuda::open()?;
        let module = cuda.load(pattern::KERNELS)?;
        let (step, spin) = (cuda.kernel(module, c"step")?, cuda.kernel(module, c"spin")?);
        let mut buffers = Vec::new();
        let mut numbers = Vec::new();
        for buffer in 0..BUFFERS {
            numbers.clear();
            numbers.extend((0..LENGTH).map(|at| pattern::initial(seed, buffer, at)));
            let place = cuda.allocate(size_of_val(numbers.as_slice()))?;
            cuda.upload(place, &numbers)?;
            buffers.push(place);
        }
        cuda.synchronise()?;
        say(READY)?;
        Ok(Self {
            cuda,
            step,
            spin,
            buffers,
            numbers,
        })
    }

    fn obey(&mut self) -> Result<(), String> {
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|error| error.to_string())?;
            let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
            let answer = match word {
                "step" => {
                    self.launch_steps()?;
                    self.sum()?
                }
                "spin" => {
                    let seconds: u64 = rest.parse().map_err(|_| format!("spin {rest}"))?;
                    self.launch_spin(seconds * 1_000_000_000)?;
                    self.launch_steps()?;
                    say(SPINNING)?;
                    self.sum()?
                }
                "uuid" => self.cuda.uuid()?,
                "memory" => {
                    let (free, total) = self.cuda.memory()?;
                    format!("{free} {total}")
                }
                "exit" => return say("bye"),
                _ => return Err(format!("no such order: {line}")),
            };
            say(&answer)?;
        }
        Ok(())
    }

    fn launch_steps(&self) -> Result<(), String> {
        let mut count = LENGTH;
        for buffer in &self.buffers {
            let mut place = *buffer;
            let arguments: &mut [*mut c_void] =
                &mut [(&raw mut place).cast(), (&raw mut count).cast()];
            self.cuda
                .launch(self.step, LENGTH.div_ceil(WIDTH), WIDTH, arguments)?;
        }
        Ok(())
    }

    fn launch_spin(&self, mut nanoseconds: u64) -> Result<(), String> {
        self.cuda
            .launch(self.spin, 1, 1, &mut [(&raw mut nanoseconds).cast()])
    }

    /// Waits for the GPU, and fetches what it has computed.
    fn sum(&mut self) -> Result<String, String> {
        self.cuda.synchronise()?;
        let mut sum = 0;
        for buffer in &self.buffers {
            self.cuda.download(*buffer, &mut self.numbers)?;
            for number in &self.numbers {
                sum = pattern::checksum(sum, *number);
            }
        }
        Ok(sum_text(sum))
    }
}
