//! Passes the linker arguments of the bootable image: freestanding, static, with the addresses of
//! `link.ld`. The image is built by
//! ```text
//! cargo rustc --release -p slipgate-guest --features image --bin slipgate-guest -- -C relocation-model=static
//! ```
use std::env;

fn main() {
    println!("cargo::rerun-if-changed=link.ld");
    if env::var_os("CARGO_FEATURE_IMAGE").is_none() {
        return;
    }
    let script = format!(
        "{}/link.ld",
        env::var("CARGO_MANIFEST_DIR").unwrap_or_default()
    );
    for argument in [
        "-nostartfiles",
        "-nostdlib",
        "-static",
        "-no-pie",
        "-Wl,--build-id=none",
        "-Wl,-z,norelro",
        "-Wl,-T",
        &script,
    ] {
        println!("cargo::rustc-link-arg-bin=slipgate-guest={argument}");
    }
}
