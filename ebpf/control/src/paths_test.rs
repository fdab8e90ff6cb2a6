use super::*;

#[test]
fn one_directory_has_one_lock_however_it_is_written() {
    let of = |path: &str| Paths::with_pin_dir(path.into()).unwrap();
    let plain = of("/sys/fs/bpf/slipgate-x/y");
    assert_eq!(of("/sys/fs/bpf/./slipgate-x//y/"), plain);
    assert_eq!(of("/sys/fs/../fs/bpf/slipgate-x/y"), plain);
    assert_ne!(of("/sys/fs/bpf/slipgate-x/z").run_dir, plain.run_dir);
    let usual = Paths::of_this_netns().unwrap();
    assert_eq!(of(usual.pin_dir.to_str().unwrap()), usual);
}
