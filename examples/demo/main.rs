//! A session on a machine that has no GPU: `cargo run --example demo`.
//!
//! It makes a temporary machine, with stand-ins for NVIDIA's two programs first on PATH, and runs the real binary there
//! as a user would. Nothing outside of the temporary directory is touched. Called by the name of one of NVIDIA's
//! programs, it is the stand-in; the tests use it as well.

mod limits;
mod stand_in;
mod stub;

use std::error::Error;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let name = std::env::args_os().next().map(PathBuf::from);
    let name = name.as_deref().and_then(Path::file_name);
    match name.and_then(|name| name.to_str()) {
        Some(stand_in::NVIDIA_SMI) => stand_in::nvidia_smi(),
        Some(stand_in::CONTROL) => stand_in::control(),
        _ => match demo() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("demo: {error}");
                ExitCode::FAILURE
            }
        },
    }
}

fn demo() -> Result<(), Box<dyn Error>> {
    let uni_cumps = build()?;
    let machine = tempfile::Builder::new().prefix("demo-").tempdir()?;
    let machine = machine.path();
    let bin = machine.join("bin");
    for directory in ["bin", "home", "tmp"] {
        std::fs::create_dir(machine.join(directory))?;
    }
    let ourselves = std::env::current_exe()?;
    for name in [
        stand_in::NVIDIA_SMI,
        stand_in::CONTROL,
        "nvidia-cuda-mps-server",
    ] {
        symlink(&ourselves, bin.join(name))?;
    }
    symlink(&uni_cumps, bin.join("uni-cumps"))?;
    std::fs::write(
        bin.join("gpus.csv"),
        "0, GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40, Default\n",
    )?;

    let lib = machine.join("lib");
    std::fs::create_dir(&lib)?;
    stub::compile(&lib.join("libcuda.so.1"), &[])?;

    println!(
        "A temporary machine with one made-up GPU and a stand-in control daemon:\n{}\n",
        machine.display()
    );
    let mut failed = false;
    for line in [
        "uni-cumps status",
        "uni-cumps start",
        "eval \"$(uni-cumps env)\"; echo \"$CUDA_MPS_PIPE_DIRECTORY\"",
        "uni-cumps doctor --only answer --only cuda-driver",
        "uni-cumps stop",
        "uni-cumps status",
    ] {
        println!("$ {line}");
        let status = Command::new("/bin/sh")
            .args(["-c", line])
            .env_clear()
            .env("HOME", machine.join("home"))
            .env("TMPDIR", machine.join("tmp"))
            .env("PATH", &bin)
            .env("LD_LIBRARY_PATH", &lib)
            .env("STUB_GPUS", bin.join("gpus.csv"))
            .current_dir(machine)
            .status()?;
        failed |= !status.success();
        println!();
    }
    if failed {
        let mut stop = Command::new(&uni_cumps);
        stop.args(["stop", "--all"]).env_clear();
        stop.env("HOME", machine.join("home")).env("PATH", &bin);
        stop.status()?;
        return Err("a command of the session failed".into());
    }
    println!("On a machine with a GPU the same commands work with NVIDIA's own programs.");
    Ok(())
}

/// Builds the real binary and says where it is. An example is not built together with the binary.
fn build() -> Result<PathBuf, Box<dyn Error>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "--bin", "uni-cumps"]);
    build.current_dir(env!("CARGO_MANIFEST_DIR"));
    // target/<profile>/examples/demo
    let ourselves = std::env::current_exe()?;
    let profile = ourselves
        .ancestors()
        .nth(2)
        .ok_or("the example is not in a target directory")?;
    if profile.ends_with("release") {
        build.arg("--release");
    }
    if !build.status()?.success() {
        return Err("cargo could not build uni-cumps".into());
    }
    Ok(profile.join("uni-cumps"))
}
