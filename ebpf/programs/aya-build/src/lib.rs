//! Stands for aya's crate of this name while the BPF programs are built.
//!
//! The build scripts of aya-ebpf and its bindings call one function of it, which tells the compiler
//! the architecture of the kernel that the programs are for. The real crate also builds programs,
//! for which it brings cargo_metadata, serde and a second syn: half of what there would be to
//! compile before the first program.
use std::{env, io};

/// What a build script returns.
pub type Result<T> = io::Result<T>;

/// Tells rustc `bpf_target_arch`, the architecture whose registers the bindings describe: that of
/// the machine that compiles, or the one that `AYA_BPF_TARGET_ARCH` names.
///
/// # Errors
/// Cargo did not say what it compiles on.
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
