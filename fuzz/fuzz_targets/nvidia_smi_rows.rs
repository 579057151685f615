//! What nvidia-smi prints: each line is a GPU or a message, and a UUID that was read is read as itself.
#![no_main]

use libfuzzer_sys::fuzz_target;
use uni_cumps::gpu::Gpu;
use uni_cumps::nvidia_smi;

fuzz_target!(|output: &[u8]| {
    let output = String::from_utf8_lossy(output);
    let (gpus, messages) = nvidia_smi::rows(&output);
    let lines = output.lines().filter(|line| !line.trim().is_empty());
    assert_eq!(gpus.len() + messages.len(), lines.count());
    for gpu in gpus.iter().filter_map(Gpu::identity) {
        assert_eq!(gpu.uuid.as_str().parse().as_ref(), Ok(&gpu.uuid));
    }
});
