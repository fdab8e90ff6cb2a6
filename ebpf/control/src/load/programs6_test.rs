use std::fs;

use super::*;
use crate::{
    Datapath,
    load::LoadOptions,
    testing::{in_netns, options},
};

/// Starts, and stops in an orderly way that leaves the pins.
fn start(ipv6: bool) {
    let options = LoadOptions { ipv6, ..options() };
    drop(Datapath::open(&options).unwrap());
}

fn ids(paths: &Paths) -> Vec<u32> {
    let array = bpf::obj_get(&paths.pin(PROGRAMS6)).unwrap();
    Program6::ALL
        .into_iter()
        .map(|program| {
            let (index, mut id) = (program as u32, 0_u32);
            // SAFETY: words, as the array has them.
            let found = unsafe {
                bpf::lookup(
                    array.as_fd(),
                    (&raw const index).cast(),
                    (&raw mut id).cast(),
                )
            };
            assert!(found.unwrap(), "{} is not there", program.name());
            id
        })
        .collect()
}

#[test]
fn the_array_outlives_the_process_and_another_start_joins_or_replaces_its_programs() {
    let test = "the_array_outlives_the_process_and_another_start_joins_or_replaces_its_programs";
    in_netns(test, || {
        let paths = options().paths;
        start(false);
        assert!(!are_in_use(&paths), "no VM gets IPv6");
        start(true);
        assert!(are_there(&paths));
        let first = ids(&paths);
        start(true);
        assert_eq!(ids(&paths), first, "the same build joins them");
        // As another build left it.
        fs::write(paths.run_dir.join(crate::paths::BUILD_FILE), "another").unwrap();
        start(false);
        let second = ids(&paths);
        assert!(second.iter().all(|id| !first.contains(id)), "{second:?}");
        // A place that is empty, by whoever has root, is filled.
        let array = bpf::obj_get(&paths.pin(PROGRAMS6)).unwrap();
        let index = Program6::EnginePort as u32;
        // SAFETY: a word, as the array's keys are.
        assert!(unsafe { bpf::delete(array.as_fd(), (&raw const index).cast()) }.unwrap());
        drop(array);
        assert!(!are_there(&paths));
        start(true);
        assert!(are_there(&paths));
    });
}
