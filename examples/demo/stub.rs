//! Compiles the stand-in for libcuda.so.1, which must be a library of its own.

use std::io;
use std::path::Path;
use std::process::Command;

const SOURCE: &str = include_str!("libcuda.rs");

/// Compiles it into `library`, with these further arguments for rustc.
pub(crate) fn compile(library: &Path, arguments: &[&str]) -> io::Result<()> {
    let directory = library.parent().unwrap_or(library);
    let work = tempfile::tempdir_in(directory)?;
    let source = work.path().join("libcuda.rs");
    std::fs::write(&source, SOURCE)?;
    let output = work.path().join("libcuda.so.1");
    // The compiler beside the cargo that runs us.
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(Path::new(&cargo).with_file_name("rustc"))
        .args([
            "--edition",
            "2024",
            "--crate-type",
            "cdylib",
            "-C",
            "debuginfo=0",
        ])
        .args(arguments)
        .arg("-o")
        .arg(&output)
        .arg(&source)
        .status()?;
    if !status.success() {
        return Err(io::Error::other(
            "rustc could not compile the stand-in for libcuda",
        ));
    }
    std::fs::rename(output, library)
}
