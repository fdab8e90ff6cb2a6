//! The BPF target description, with the atomics of instruction set v3.
//!
//! rustc's own `bpfel-unknown-none` describes the oldest instruction set, which has no `AtomicU32`
//! and no `fetch_add` on `AtomicU64`. From v3 on, the kernel (5.12) and LLVM support add, and, or,
//! xor, exchange and compare-and-exchange, each with 32 and 64 bits (RFC 9669, section 5.3). So the
//! target is the compiler's own description with these atomics enabled.
//!
//! LLVM does not translate an atomic *load* or *store* for v3: bpf-linker stops with "Cannot
//! select: AtomicStore". The programs use aligned volatile reads and writes instead, which compile
//! to the same single instruction.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::{setup::Compiler, workspace::capture};

/// Cargo's name of the target, and so the name of its output directory.
pub(super) const NAME: &str = "bpfel-v3";

/// Writes the description into `folder` unless it is there already. Returns its path.
pub(super) fn describe(compiler: &Compiler, folder: &Path) -> Result<PathBuf> {
    let ask = [
        "-Zunstable-options",
        "--print=target-spec-json",
        "--target=bpfel-unknown-none",
    ];
    let told = capture(compiler.rustc().args(ask))?;
    let spec = with_atomics(&told)?;
    let path = folder.join(format!("{NAME}.json"));
    if !fs::read_to_string(&path).is_ok_and(|old| old == spec) {
        fs::write(&path, spec).with_context(|| format!("could not write {}", path.display()))?;
    }
    Ok(path)
}

/// Returns rustc's target description `told`, changed to instruction set v3.
fn with_atomics(told: &str) -> Result<String> {
    let mut spec: Value =
        serde_json::from_str(told).context("the compiler's target description is not JSON")?;
    if spec["arch"] != "bpf" {
        bail!(
            "the compiler describes bpfel-unknown-none as the architecture {}",
            spec["arch"]
        );
    }
    spec["cpu"] = json!("v3");
    spec["atomic-cas"] = json!(true);
    spec["min-atomic-width"] = json!(32);
    spec["max-atomic-width"] = json!(64);
    spec["singlethread"] = json!(false);
    Ok(format!("{spec:#}\n"))
}

#[cfg(test)]
#[path = "target_test.rs"]
mod tests;
