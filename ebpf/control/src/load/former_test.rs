use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    os::fd::AsFd as _,
    path::Path,
    sync::atomic::Ordering::Acquire,
};

use slipgate_abi::{NameValue, SlotIndex, Verdict};

use super::*;
use crate::{
    Datapath, Owner,
    maps::open_pins,
    testing::{in_netns, options},
};

/// Address that a name opened in the former version's fixture.
const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 20));

fn bytes_of(hex: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(byte).collect()
}

/// Kind of a map by its name in a fixture, and its flags.
fn kind_of(name: &str, flags: u32) -> Kind {
    let number = match name {
        "array" => Kind::MAPPED_ARRAY.number,
        "hash" => Kind::HASH.number,
        "lpm_trie" => Kind::TRIE.number,
        other => panic!("a map of kind {other}"),
    };
    Kind { number, flags }
}

/// Pins the maps of the former version's fixture, which `tests/tests/stress/layout.rs` describes.
fn pin_former(paths: &Paths) {
    let version = FORMER.unwrap().version;
    let file = format!("../../tests/fixtures/maps-{version}.txt");
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    for part in text.split("\nmap ").skip(1) {
        let mut lines = part.lines();
        let words: Vec<&str> = lines.next().unwrap().split(' ').collect();
        let [name, kind, key, value, entries, flags] = words[..] else {
            panic!("{words:?} is no shape");
        };
        let number = |word: &str| word.parse::<u32>().unwrap();
        let shape = Shape {
            kind: kind_of(kind, number(flags)),
            key: number(key),
            value: number(value),
            entries: number(entries),
        };
        let fd = bpf::map_create(name, shape).unwrap();
        for line in lines {
            let (key, value) = line.split_once(' ').unwrap();
            let (key, mut value) = (bytes_of(key), bytes_of(value));
            value.resize(shape.value as usize, 0);
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
        pin_former(&paths);
        let pins = open_pins(&paths.pin_dir).err();
        assert!(pins.is_some(), "they are not this version's");
        // As a start that died among the renames left them.
        convert(&paths, FORMER.as_ref()).unwrap();
        let names = paths.pin(MapName::Names.name());
        fs::rename(&names, copy_of(&paths, MapName::Names)).unwrap();
        fs::rename(paths.pin("META"), copy_of(&paths, MapName::Meta)).unwrap();
        let old = bpf::map_create("META", MapName::Meta.shape(Sizes::of_slots(1_024))).unwrap();
        let mut value = [0; 16];
        value[..4].copy_from_slice(&FORMER.unwrap().version.to_ne_bytes());
        // SAFETY: META has a word as key, and a value of 16 bytes.
        unsafe { bpf::update(old.as_fd(), [0u8; 4].as_ptr(), value.as_ptr(), 0).unwrap() };
        bpf::obj_pin(old.as_fd(), &paths.pin("META")).unwrap();

        // It completes them.
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
        let names = maps.names.entries().unwrap();
        let of_name = |(key, name): &(NameKey, NameValue)| {
            (key.address(), *key) == (SERVER, NameKey::new(key.id(), SERVER, name.name()))
        };
        assert!(names.len() == 1 && names.iter().all(of_name), "{names:?}");
        assert_eq!(maps.flows6.entries().unwrap(), []);
        let row = slipgate_abi::VmRow::new(1);
        assert_eq!(maps.vm6(row).unwrap().copy(), slipgate_abi::Vm6::OFF);
        // What version 5 counted, and zeroes behind it.
        // SAFETY: a mapped row of integers.
        let counters = unsafe { maps.counters(row).unwrap().read_volatile() };
        assert_eq!(counters.engine_rx_from_guest.packets, 4);
        assert_eq!(counters.router_advertisements, 0);
    });
}

#[test]
fn counters_of_version_5_stay_what_they_are_behind_a_reason_that_was_added() {
    // What version 5 did not have: reasons to refuse a flow, and two counters at the end.
    let added = (ADDED_REFUSALS + 2) * size_of::<u64>();
    let former = vec![0; size_of::<VmCounters>() - added];
    let set = |value: &mut Vec<u8>, at: usize, count: u64| {
        value[at..at + 8].copy_from_slice(&count.to_ne_bytes());
    };
    let mut value = former;
    let last_refusal = ADDED_REFUSAL - size_of::<u64>();
    let by_rule = offset_of!(VmCounters, refused_by_rule) - ADDED_REFUSALS * size_of::<u64>();
    let lost = offset_of!(VmCounters, pcap_lost) - ADDED_REFUSALS * size_of::<u64>();
    set(&mut value, last_refusal, 7);
    set(&mut value, by_rule, 8);
    set(&mut value, lost, 9);
    let key = 1u32.to_ne_bytes().to_vec();
    let (_, value) = of_version_5(MapName::Counters, (key, value)).unwrap();
    assert_eq!(value.len(), size_of::<VmCounters>());
    // SAFETY: as many bytes, of integers.
    let counters: VmCounters = unsafe { value.as_ptr().cast::<VmCounters>().read_unaligned() };
    assert_eq!(counters.refused.inspection, 7);
    assert_eq!(counters.refused.byte_budget, 0);
    assert_eq!(counters.refused.no_address, 0);
    assert_eq!(counters.refused.no_socket, 0);
    assert_eq!(counters.refused_by_rule[0].rule, 8);
    assert_eq!(counters.pcap_lost, 9);
    assert_eq!(counters.router_advertisements, 0);
}

#[test]
fn maps_by_which_a_process_serves_are_not_converted() {
    in_netns("maps_by_which_a_process_serves_are_not_converted", || {
        let datapath = Datapath::open(&options()).unwrap();
        let paths = datapath.paths();
        let _owner = Owner::take(datapath.maps(), paths, &["a"]).unwrap();
        let version = datapath.maps().meta_abi_version();
        let theirs = FORMER.unwrap().version;
        version.store(theirs, std::sync::atomic::Ordering::Release);
        convert(paths, FORMER.as_ref()).unwrap();
        assert_eq!(version.load(Acquire), theirs);
        assert!(Datapath::open(&options()).is_err());
    });
}
