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

#[test]
fn what_the_dead_left_is_swept_and_what_somebody_has_is_not() {
    let root = tempfile::tempdir().unwrap();
    let run = root.path().join("run");
    let pins = root.path().join("pins");
    let make = |name: &str, pin_dir: &Path| {
        let dir = run.join(name);
        fs::create_dir_all(&dir).unwrap();
        for file in [
            "lock",
            "owner-0.lock",
            "netns-cookie",
            "0.sock",
            "0.policy",
            "0.policy-new",
        ] {
            fs::write(dir.join(file), "1").unwrap();
        }
        fs::write(dir.join(PINS_FILE), pin_dir.as_os_str().as_bytes()).unwrap();
        dir
    };
    fs::create_dir(&pins).unwrap();
    let gone = pins.join("gone");
    let dead = make("dead", &gone);
    let pinned = make("pinned", &pins);
    let (starts, serves) = (make("starts", &gone), make("serves", &gone));
    let empty = run.join("empty");
    fs::create_dir(&empty).unwrap();
    let starting = FileLock::wait(&starts.join("lock")).unwrap();
    let serving = FileLock::wait(&serves.join("owner-0.lock")).unwrap();
    assert_eq!(sweep_run_dirs_in(&run), 2);
    assert!(!dead.exists() && !empty.exists());
    assert!(pinned.exists() && starts.exists() && serves.exists());
    drop((starting, serving));
    assert_eq!(sweep_run_dirs_in(&run), 2);
    assert!(pinned.exists() && !starts.exists() && !serves.exists());
}
