use std::sync::{
    Barrier,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use super::*;

#[test]
fn threads_are_set_up_side_by_side_and_all_are_waited_for() {
    // Each setup ends only when both are under way.
    let both = Arc::new(Barrier::new(2));
    let done = Arc::new(Mutex::new(Vec::new()));
    let setup = ThreadSetup::new({
        let (both, done) = (both.clone(), done.clone());
        move |kind| {
            both.wait();
            done.lock().unwrap().push(kind);
            Ok(())
        }
    });
    let first = spawn("first", ThreadKind::Vcpu, &setup, || {}).unwrap();
    // By a clone, as devices have one.
    let second = spawn("second", ThreadKind::Disk, &setup.clone(), || {}).unwrap();
    setup.finish().unwrap();
    assert_eq!(done.lock().unwrap().len(), 2);
    for thread in [first, second] {
        thread.join().unwrap();
    }
}

#[test]
fn a_thread_whose_setup_fails_does_no_work_and_is_told_of() {
    let setup = ThreadSetup::new(|kind| match kind {
        ThreadKind::Disk => Err(io::Error::other("refused")),
        _ => Ok(()),
    });
    let worked = Arc::new(AtomicBool::new(false));
    let other = spawn("other", ThreadKind::Vcpu, &setup, || {}).unwrap();
    let refused = spawn("refused", ThreadKind::Disk, &setup, {
        let worked = worked.clone();
        move || worked.store(true, SeqCst)
    })
    .unwrap();
    assert_eq!(setup.finish().unwrap_err().to_string(), "refused");
    for thread in [other, refused] {
        thread.join().unwrap();
    }
    assert!(!worked.load(SeqCst));
    // It is said once.
    setup.finish().unwrap();
}

#[test]
fn a_setup_that_panics_is_an_error() {
    let setup = ThreadSetup::new(|_| panic!("on purpose"));
    let thread = spawn("panics", ThreadKind::Device, &setup, || {}).unwrap();
    let error = setup.finish().unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
    thread.join().unwrap_err();
}
