//! Puts the two builds of the BPF object where `src/object.rs` includes them from.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

const OBJECTS: [&str; 2] = ["slipgate.o", "slipgate-log.o"];

fn main() {
    println!("cargo:rerun-if-env-changed=SLIPGATE_BPF_DIR");
    let var = |name: &str| PathBuf::from(env::var_os(name).expect("cargo sets it"));
    let from = match env::var_os("SLIPGATE_BPF_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => var("CARGO_MANIFEST_DIR").join("../../target/bpf"),
    };
    for object in OBJECTS {
        let source = from.join(object);
        println!("cargo:rerun-if-changed={}", source.display());
        copy(&source, &var("OUT_DIR").join(object));
    }
}

fn copy(source: &Path, target: &Path) {
    if let Err(error) = fs::copy(source, target) {
        println!(
            "cargo:error=no BPF object at {} ({error}): build it with `cargo xtask build --bpf-only`, \
             or name the directory of a built one in SLIPGATE_BPF_DIR",
            source.display()
        );
    }
}
