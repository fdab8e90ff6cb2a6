//! Copies the built-in guest to the place from which `src/role/vmm.rs` includes it.
//!
//! On a fresh clone it is not built yet. Then an empty stub takes its place, so that `cargo check`
//! and editors work; booting a stub is an error with this reason. A release build, and one that
//! `cargo xtask` starts, never embeds a stub.

use std::{env, fs, io, path::PathBuf};

const IMAGE: &str = "slipgate-guest";
/// The folder of a built image, if not the workspace's.
const FOLDER: &str = "SLIPGATE_GUEST_DIR";
/// Environment variable, set by builds that have built the image before and must not embed a stub.
const NO_STUBS: &str = "SLIPGATE_NO_STUBS";

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-env-changed={FOLDER}");
    let var = |name: &str| PathBuf::from(env::var_os(name).expect("cargo sets it"));
    // No other machine has the VMM that boots it.
    if env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch != "x86_64") {
        return Ok(());
    }
    let from = match env::var_os(FOLDER) {
        Some(folder) => PathBuf::from(folder),
        None => var("CARGO_MANIFEST_DIR").join("../target/guest"),
    };
    let (source, target) = (from.join(IMAGE), var("OUT_DIR").join(IMAGE));
    let Err(error) = fs::copy(&source, &target) else {
        println!("cargo:rerun-if-changed={}", source.display());
        return Ok(());
    };
    let missing = format!("no built-in guest at {} ({error})", source.display());
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    if is_release || env::var_os(NO_STUBS).is_some() || env::var_os(FOLDER).is_some() {
        println!(
            "cargo:error={missing}: build it with `cargo xtask build --guest-only`, or name the \
             directory of a built one in {FOLDER}"
        );
        return Ok(());
    }
    // A file that is not there would make cargo compile the crate anew each time; its folder says
    // as well when it comes.
    fs::create_dir_all(&from)?;
    println!("cargo:rerun-if-changed={}", from.display());
    println!("cargo:rerun-if-env-changed={NO_STUBS}");
    println!(
        "cargo:warning={missing}: an empty stub is embedded, and `slipgate run` needs --kernel until \
         you run `cargo xtask build --guest-only` and build again"
    );
    fs::write(&target, "")
}
