//! Puts the built-in guest where `src/role/vmm.rs` includes it from.

use std::{env, fs, path::PathBuf};

const IMAGE: &str = "slipgate-guest";

fn main() {
    println!("cargo:rerun-if-env-changed=SLIPGATE_GUEST_DIR");
    let var = |name: &str| PathBuf::from(env::var_os(name).expect("cargo sets it"));
    let from = match env::var_os("SLIPGATE_GUEST_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => var("CARGO_MANIFEST_DIR").join("../target/guest"),
    };
    let image = from.join(IMAGE);
    println!("cargo:rerun-if-changed={}", image.display());
    if let Err(error) = fs::copy(&image, var("OUT_DIR").join(IMAGE)) {
        println!(
            "cargo:error=no built-in guest at {} ({error}): build it with `cargo xtask build \
             --guest-only`, or name the directory of a built one in SLIPGATE_GUEST_DIR",
            image.display()
        );
    }
}
