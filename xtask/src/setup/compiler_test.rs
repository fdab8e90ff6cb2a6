use super::is_for_another_toolchain;

#[test]
fn drops_what_steers_a_compiler_and_keeps_the_rest() {
    for name in [
        "RUSTFLAGS",
        "RUSTUP_TOOLCHAIN",
        "CARGO_TARGET_DIR",
        "RUSTC_WRAPPER",
        "CARGO",
    ] {
        assert!(is_for_another_toolchain(name), "{name}");
    }
    for name in [
        "CARGO_HOME",
        "RUSTUP_HOME",
        "CARGO_NET_OFFLINE",
        "PATH",
        "RUST_BACKTRACE",
    ] {
        assert!(!is_for_another_toolchain(name), "{name}");
    }
}
