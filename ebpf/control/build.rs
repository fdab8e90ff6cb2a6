//! Puts the two builds of the BPF object where `src/object.rs` includes them from.
//!
//! On a fresh clone nobody has built them yet. Then empty stubs take their place, so that
//! `cargo check` and editors work without the tools for BPF; loading a stub is an error that says
//! so. A release build, and one that `cargo xtask` starts, never embeds a stub, but for the logging
//! object under `cargo xtask run`: compiling it takes long, and only `--bpf-log` loads it.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

const LOGGING: &str = "slipgate-log.o";
const OBJECTS: [&str; 2] = ["slipgate.o", LOGGING];
/// The folder of built objects, if not the workspace's.
const FOLDER: &str = "SLIPGATE_BPF_DIR";
/// Set by whoever has built the objects before and wants no stub.
const NO_STUBS: &str = "SLIPGATE_NO_STUBS";
/// Set by whoever does without the logging object, even where there may be no stubs.
const NO_LOGGING: &str = "SLIPGATE_NO_BPF_LOG";

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-env-changed={FOLDER}");
    let var = |name: &str| PathBuf::from(env::var_os(name).expect("cargo sets it"));
    let from = match env::var_os(FOLDER) {
        Some(folder) => PathBuf::from(folder),
        None => var("CARGO_MANIFEST_DIR").join("../../target/bpf"),
    };
    for object in OBJECTS {
        embed(&from, object, &var("OUT_DIR"))?;
    }
    Ok(())
}

fn embed(from: &Path, object: &str, into: &Path) -> io::Result<()> {
    let source = from.join(object);
    let Err(error) = fs::copy(&source, into.join(object)) else {
        println!("cargo:rerun-if-changed={}", source.display());
        return Ok(());
    };
    let missing = format!("no BPF object at {} ({error})", source.display());
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let is_waived = object == LOGGING && env::var_os(NO_LOGGING).is_some();
    let wants_all = is_release || env::var_os(NO_STUBS).is_some() || env::var_os(FOLDER).is_some();
    if wants_all && !is_waived {
        println!(
            "cargo:error={missing}: build it with `cargo xtask build --bpf-only`, or name the \
             directory of a built one in {FOLDER}"
        );
        return Ok(());
    }
    // A file that is not there would make cargo compile the crate anew each time; its folder says
    // as well when it comes.
    fs::create_dir_all(from)?;
    println!("cargo:rerun-if-changed={}", from.display());
    for variable in [NO_STUBS, NO_LOGGING] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    if is_waived {
        return fs::write(into.join(object), "");
    }
    println!(
        "cargo:warning={missing}: an empty stub is embedded, and what is built can't load the BPF \
         programs until you run `cargo xtask build --bpf-only` and build again"
    );
    fs::write(into.join(object), "")
}
