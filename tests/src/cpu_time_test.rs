use std::{hint, sync::mpsc, thread, time::Instant};

use super::*;

/// Uses the CPU for as long, by the thread's own clock.
fn use_cpu(time: Duration) {
    let begin = Instant::now();
    while of_threads(std::process::id(), |name| name == "cpu-user") < time {
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "no CPU time is seen"
        );
        (0..10_000).for_each(|number| {
            hint::black_box(number);
        });
    }
}

#[test]
fn the_time_of_chosen_threads_is_summed_and_of_no_others() {
    let (done, ended) = mpsc::channel::<()>();
    let (said, ready) = mpsc::channel();
    let start = |name: &str, time| {
        let (done, said) = (done.clone(), said.clone());
        let work = move || {
            use_cpu(time);
            said.send(()).unwrap();
            // Its time is gone with it.
            while done.send(()).is_ok() {
                thread::sleep(Duration::from_millis(5));
            }
        };
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(work)
            .unwrap();
    };
    start("cpu-user", Duration::from_millis(20));
    ready.recv().unwrap();
    let pid = std::process::id();
    let of = |name: &str| of_threads(pid, |thread| thread == name);
    assert!(of("cpu-user") >= Duration::from_millis(20));
    assert_eq!(of("nobody"), Duration::ZERO);
    assert!(of_threads(pid, |_| true) >= of("cpu-user"));
    drop(ended);
}
