//! Replacement for aya's crate of this name in builds of the BPF programs.
//!
//! The build scripts of aya-ebpf and its bindings call one function of it, which passes the
//! architecture of the target kernel to the compiler. The real crate also builds programs and
//! depends on cargo_metadata, serde and a second syn: half of the code that would be compiled
//! before the first program.
use std::{env, io};

/// Result of a build script.
pub type Result<T> = io::Result<T>;

/// Sets `bpf_target_arch` for rustc, the architecture whose registers the bindings describe:
/// `AYA_BPF_TARGET_ARCH` if it is set, else the architecture of the compiling machine.
///
/// # Errors
/// Neither `AYA_BPF_TARGET_ARCH` nor cargo's `HOST` is set.
pub fn emit_bpf_target_arch_cfg() -> Result<()> {
    const GIVEN: &str = "AYA_BPF_TARGET_ARCH";
    println!("cargo:rerun-if-env-changed={GIVEN}");
    println!("cargo:rustc-check-cfg=cfg(bpf_target_arch, values(any()))");
    if env::var_os("CARGO_CFG_BPF_TARGET_ARCH").is_some() {
        return Ok(());
    }
    let host = || {
        let host = env::var("HOST").map_err(|why| io::Error::other(format!("HOST: {why}")))?;
        Ok::<_, io::Error>(host.split('-').next().unwrap_or_default().to_owned())
    };
    let arch = env::var(GIVEN).or_else(|_| host())?;
    // Triples of RISC-V name its extensions too.
    let arch = match arch.starts_with("riscv64") {
        true => "riscv64",
        false => &arch,
    };
    println!("cargo:rustc-cfg=bpf_target_arch=\"{arch}\"");
    Ok(())
}
