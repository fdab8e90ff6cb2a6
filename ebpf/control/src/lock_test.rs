use super::*;

#[test]
fn nobody_waits_for_ever_and_who_holds_it_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lock");
    let held = FileLock::wait(&path, PATIENCE).unwrap();
    let begun = Instant::now();
    let refused = FileLock::wait(&path, Duration::from_millis(50)).unwrap_err();
    assert!(begun.elapsed() >= Duration::from_millis(50));
    assert!(refused.is_locked());
    let text = refused.to_string();
    let us = format!("slipgate process {}", std::process::id());
    assert!(text.contains(&us) && text.contains("lock"), "{text}");
    // Without patience: a try.
    assert!(
        FileLock::wait(&path, Duration::ZERO)
            .unwrap_err()
            .is_locked()
    );
    drop(held);
    FileLock::wait(&path, Duration::ZERO).unwrap();
}

#[test]
fn who_waits_gets_it_as_soon_as_it_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lock");
    let held = FileLock::wait(&path, PATIENCE).unwrap();
    let waiting = {
        let path = path.clone();
        std::thread::spawn(move || FileLock::wait(&path, PATIENCE).map(drop))
    };
    std::thread::sleep(Duration::from_millis(30));
    assert!(!waiting.is_finished());
    drop(held);
    waiting.join().unwrap().unwrap();
}

#[test]
fn the_holder_is_found_among_the_kernels_locks() {
    let locks = "\
1: POSIX  ADVISORY  WRITE 11 08:02:77 0 EOF
2: FLOCK  ADVISORY  WRITE 12 08:02:78 0 EOF
3: FLOCK  ADVISORY  WRITE 13 08:02:77 0 EOF
3: -> FLOCK  ADVISORY  WRITE 14 08:02:79 0 EOF
";
    let device = libc::makedev(8, 2);
    assert_eq!(holder_in(locks, device, 77), Some(13));
    assert_eq!(holder_in(locks, device, 78), Some(12));
    assert_eq!(holder_in(locks, device, 79), None, "it waits");
    assert_eq!(holder_in(locks, libc::makedev(8, 3), 77), None);
    assert_eq!(holder_in("nonsense\n5:\n", device, 77), None);
}
