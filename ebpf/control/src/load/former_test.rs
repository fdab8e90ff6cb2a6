use std::{fs, os::fd::AsFd as _, path::Path, sync::atomic::Ordering::Acquire};

use slipgate_abi::{SlotIndex, Verdict};

use super::*;
use crate::{
    Datapath, Owner,
    testing::{in_netns, options},
};

/// A version that never was: its slots are shorter by this, and it has no SEQUENCES.
const SHORTER_BYTES: u32 = 8;
const IMAGINED: Former = Former {
    version: ABI_VERSION - 1,
    element: |map, (key, mut value)| {
        if map == MapName::Slots {
            value.extend([0; SHORTER_BYTES as usize]);
        }
        Some((key, value))
    },
};

fn bytes_of(hex: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(byte).collect()
}

/// Pins the maps of the fixture that `tests/tests/stress/layout.rs` describes, as the imagined
/// version would have them.
fn pin_imagined(paths: &Paths) {
    let file = format!("../../tests/fixtures/maps-{ABI_VERSION}.txt");
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    for part in text.split("\nmap ").skip(1) {
        let mut lines = part.lines();
        let name = lines.next().unwrap().split(' ').next().unwrap();
        let map = MapName::ALL
            .into_iter()
            .find(|map| map.name() == name)
            .unwrap();
        let mut shape = map.shape(Sizes::of_slots(1_024));
        match map {
            MapName::Sequences => continue,
            MapName::Slots => shape.value -= SHORTER_BYTES,
            _ => {}
        }
        let fd = bpf::map_create(name, shape).unwrap();
        for line in lines {
            let (key, value) = line.split_once(' ').unwrap();
            let (key, mut value) = (bytes_of(key), bytes_of(value));
            value.resize(shape.value as usize, 0);
            if map == MapName::Meta {
                value[..4].copy_from_slice(&IMAGINED.version.to_ne_bytes());
            }
            // SAFETY: as many bytes as the shape says.
            unsafe { bpf::update(fd.as_fd(), key.as_ptr(), value.as_ptr(), 0).unwrap() };
        }
        bpf::obj_pin(fd.as_fd(), &paths.pin(name)).unwrap();
    }
}

#[test]
fn live_flows_of_the_former_version_are_taken_over() {
    in_netns("live_flows_of_the_former_version_are_taken_over", || {
        let paths = options().paths;
        paths.create().unwrap();
        pin_imagined(&paths);
        assert!(
            Datapath::open(&options()).is_err(),
            "unless they are converted"
        );
        // As a start that died among the renames left them.
        convert(&paths, Some(&IMAGINED)).unwrap();
        let names = paths.pin(MapName::Names.name());
        fs::rename(&names, copy_of(&paths, MapName::Names)).unwrap();
        fs::rename(paths.pin("META"), copy_of(&paths, MapName::Meta)).unwrap();
        let old = bpf::map_create("META", MapName::Meta.shape(Sizes::of_slots(1_024))).unwrap();
        let mut value = [0; 16];
        value[..4].copy_from_slice(&IMAGINED.version.to_ne_bytes());
        // SAFETY: META has a word as key, and a value of 16 bytes.
        unsafe { bpf::update(old.as_fd(), [0u8; 4].as_ptr(), value.as_ptr(), 0).unwrap() };
        bpf::obj_pin(old.as_fd(), &paths.pin("META")).unwrap();
        convert(&paths, Some(&IMAGINED)).unwrap();

        let datapath = Datapath::open(&options()).unwrap();
        let maps = datapath.maps();
        let owner = Owner::take(maps, &paths, &["tap0"]).unwrap();
        assert!(owner.adopted());
        for index in [0, 1] {
            let slot = maps.slot(SlotIndex::new(index)).unwrap();
            assert_eq!(slot.verdict().load(Acquire), Verdict::Fast as u32);
            for tuple in [slot.guest_tuple(), slot.world_tuple()] {
                let flow = maps.flows.get(&tuple).unwrap();
                assert_eq!(flow.map(|flow| flow.slot), Some(index), "{tuple:?}");
            }
        }
        assert_eq!(maps.names.entries().unwrap().len(), 1);
    });
}

#[test]
fn maps_by_which_a_process_serves_are_not_converted() {
    in_netns("maps_by_which_a_process_serves_are_not_converted", || {
        let datapath = Datapath::open(&options()).unwrap();
        let paths = datapath.paths();
        let _owner = Owner::take(datapath.maps(), paths, &["a"]).unwrap();
        let version = datapath.maps().meta_abi_version();
        version.store(IMAGINED.version, std::sync::atomic::Ordering::Release);
        convert(paths, Some(&IMAGINED)).unwrap();
        assert_eq!(version.load(Acquire), IMAGINED.version);
        assert!(Datapath::open(&options()).is_err());
    });
}
