use super::*;

/// As when a guest ends while `slipgate stats` asks: no reason to take the NAT down.
#[test]
fn a_vmm_that_has_ended_is_asked_in_vain() {
    // This binary, which does not know the role, so it ends at once.
    let mut vmm = VmmProcess {
        process: ChildProcess::start(Role::Vmm, &Users::claim()).unwrap(),
        in_namespaces: false,
        disks: DiskLocks::default(),
    };
    let until = Instant::now() + Duration::from_secs(10);
    while vmm.end().is_none() {
        assert!(Instant::now() < until, "it runs on");
    }
    assert!(!vmm.ask_counters(1));
}

/// As the kernel's, for a moment after the end of a process with an io_uring.
#[test]
fn a_disk_is_free_at_the_end_though_somebody_has_it_open() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, [0; 512]).unwrap();
    let file = File::open(&path).unwrap();
    file.try_lock().unwrap();
    let elsewhere = file.try_clone().unwrap();
    let locks = DiskLocks(vec![file]);
    let other = File::open(&path).unwrap();
    assert!(other.try_lock().is_err());
    drop(locks);
    other.try_lock().unwrap();
    drop(elsewhere);
}
