use std::os::unix::fs::PermissionsExt;

use slipgate_abi::{RuleIndex, VmRow};

use super::*;
use crate::{
    SharedMaps,
    layout::{Kind, MAPS, Shape},
    maps::Insert,
    testing::{datapath, in_netns, options},
};

#[test]
fn makes_everything_then_joins_it() {
    in_netns("makes_everything_then_joins_it", || {
        let first = datapath();
        assert!(!first.joined());
        let inode = paths::netns_inode().unwrap();
        let dir = &first.paths().pin_dir;
        assert!(dir.ends_with(format!("slipgate/{inode}")), "{dir:?}");
        let mode = std::fs::metadata(dir).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        for name in MapName::ALL.map(MapName::name) {
            assert!(dir.join(name).exists(), "{name}");
        }
        for program in Program::ALL {
            assert!(dir.join(program.name()).exists(), "{program:?}");
        }
        assert_eq!(first.maps().slots(), 4_096);

        // The second has other wishes; the maps stay as they are, and are the same ones.
        let second = Datapath::open(&LoadOptions {
            sizes: Sizes {
                slots: 65_536,
                vms: 10,
                rules: 10,
            },
            ..options()
        })
        .unwrap();
        assert!(second.joined());
        assert_eq!(second.maps().sizes(), Sizes::of_slots(4_096));
        first.maps().next_vm_id().store(7, Release);
        assert_eq!(second.maps().next_vm_id().load(Acquire), 7);
        let id = |datapath: &Datapath| program_id(datapath.program(Program::GuestEgress).unwrap());
        assert_eq!(id(&first).unwrap(), id(&second).unwrap());
    });
}

#[test]
fn maps_have_the_shape_of_the_table() {
    in_netns("maps_have_the_shape_of_the_table", || {
        let datapath = datapath();
        let fds = datapath.maps().fds();
        assert_eq!(fds.len(), MAPS);
        for (map, fd) in MapName::ALL.into_iter().zip(fds) {
            assert_eq!(
                Shape::of(fd).unwrap(),
                map.shape(Sizes::of_slots(4_096)),
                "{}",
                map.name()
            );
        }
    });
}

#[test]
fn another_abi_version_is_refused_with_both_named() {
    in_netns("another_abi_version_is_refused_with_both_named", || {
        let first = datapath();
        first.maps().meta_abi_version().store(99, Release);
        let error = Datapath::open(&options()).unwrap_err();
        assert!(matches!(
            error,
            Error::AbiVersion {
                theirs: 99,
                ours: ABI_VERSION,
                ..
            }
        ));
        let text = error.to_string();
        assert!(
            text.contains("99") && text.contains(&ABI_VERSION.to_string()),
            "{text}"
        );
        assert!(!text.contains("--pin-dir"), "{text}");
        let error = SharedMaps::open_pinned(&first.paths().pin_dir).unwrap_err();
        assert!(matches!(error, Error::AbiVersion { .. }), "{error}");
    });
}

#[test]
fn a_map_of_another_shape_is_refused_with_both_named() {
    in_netns("a_map_of_another_shape_is_refused_with_both_named", || {
        let pin = {
            let first = datapath();
            first.paths().pin("OWNERS")
        };
        std::fs::remove_file(&pin).unwrap();
        let shape = Shape {
            kind: Kind::MAPPED_ARRAY,
            key: 4,
            value: 24,
            entries: 64,
        };
        let other = bpf::map_create("OWNERS", shape).unwrap();
        bpf::obj_pin(other.as_fd(), &pin).unwrap();
        let text = Datapath::open(&options()).unwrap_err().to_string();
        let ours = format!("value {} bytes", size_of::<slipgate_abi::maps::Owner>());
        for part in ["OWNERS", "value 24 bytes", &ours, "ABI version"] {
            assert!(text.contains(part), "`{part}` in: {text}");
        }
        // A network namespace has one set of pins.
        assert!(!text.contains("--pin-dir"), "{text}");
    });
}

#[test]
fn a_start_that_died_half_way_is_begun_anew() {
    in_netns("a_start_that_died_half_way_is_begun_anew", || {
        let first = datapath();
        let pin = first.paths().pin("RULES");
        std::fs::remove_file(&pin).unwrap();
        let error = Datapath::open(&options()).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Incomplete {
                    missing: "RULES",
                    ..
                }
            ),
            "{error}"
        );
        first.maps().meta_abi_version().store(0, Release);
        let second = datapath();
        assert!(!second.joined());
        assert!(pin.exists());
    });
}

#[test]
fn pins_of_a_namespace_that_is_gone_are_not_joined() {
    in_netns("pins_of_a_namespace_that_is_gone_are_not_joined", || {
        let first = datapath();
        first.maps().next_vm_id().store(7, Release);
        // As if the inode number had been given out again.
        let cookie = first.paths().run_dir.join("netns-cookie");
        std::fs::write(cookie, "12345").unwrap();
        let second = datapath();
        assert!(!second.joined());
        assert_eq!(second.maps().next_vm_id().load(Acquire), 1);
    });
}

#[test]
fn the_logging_build_loads_and_has_a_log() {
    in_netns("the_logging_build_loads_and_has_a_log", || {
        let mut datapath = Datapath::open(&LoadOptions {
            bpf_log: true,
            ipv6: true,
            ..options()
        })
        .unwrap();
        let mut log = datapath.take_log().unwrap();
        log.flush();
        assert!(datapath.take_log().is_none());
    });
}

#[test]
fn no_bpffs_there_is_said() {
    let options = LoadOptions {
        paths: Paths {
            pin_dir: "/tmp/slipgate-no-bpffs/x".into(),
            run_dir: "/tmp/slipgate-no-bpffs/run".into(),
        },
        ..LoadOptions {
            paths: Paths::of_this_netns().unwrap(),
            sizes: Sizes::of_slots(1),
            bpf_log: false,
            ipv6: false,
        }
    };
    let text = Datapath::open(&options).unwrap_err().to_string();
    assert!(text.contains("--pin-dir"), "{text}");
    assert!(!options.paths.pin_dir.exists());
}

#[test]
fn looking_where_nothing_is_pinned_says_so() {
    in_netns("looking_where_nothing_is_pinned_says_so", || {
        let paths = Paths::of_this_netns().unwrap();
        let text = crate::ReadOnlyMaps::open_pinned(&paths.pin_dir)
            .unwrap_err()
            .to_string();
        assert!(text.contains("slipgate attach"), "{text}");
    });
}

#[test]
fn sizes_are_brought_into_the_limits() {
    let slots = |slots| possible(Sizes::of_slots(slots)).slots;
    assert_eq!(slots(0), 1_024);
    assert_eq!(slots(1_024), 1_024);
    assert_eq!(slots(1_025), 2_048);
    assert_eq!(slots(u32::MAX), 1_024 * 4_096);
    let most = Sizes {
        slots: 1_024,
        vms: u32::MAX,
        rules: u32::MAX,
    };
    assert_eq!(
        (possible(most).vms, possible(most).rules),
        (65_535, 262_144)
    );
}

#[test]
fn maps_are_made_as_large_as_asked_and_whoever_joins_takes_them() {
    in_netns("maps_are_made_as_large_as_asked", || {
        let asked = Sizes {
            slots: 1_024,
            vms: 9_000,
            rules: 10_000,
        };
        let first = Datapath::open(&LoadOptions {
            sizes: asked,
            ..options()
        })
        .unwrap();
        assert_eq!(first.maps().sizes(), asked);
        let last = VmRow::new(9_000);
        assert!(first.maps().vm(last).is_some() && first.maps().rates(last).is_some());
        assert!(first.maps().vm(VmRow::new(9_001)).is_none());
        assert!(first.maps().rule_element(RuleIndex::new(9_999)).is_some());
        let second = datapath();
        assert_eq!(second.maps().sizes(), asked);
        let read = crate::ReadOnlyMaps::open_pinned(&first.paths().pin_dir).unwrap();
        assert_eq!((read.sizes(), read.rules_held()), (asked, 0));
        assert!(read.vm(last).is_some());
    });
}

#[test]
fn hash_insertions_arbitrate() {
    in_netns("hash_insertions_arbitrate", || {
        use crate::maps::InsertError;
        use slipgate_abi::{FlowRef, Ip4, Tuple};
        let datapath = datapath();
        let flows = &datapath.maps().flows;
        let tuple = |port| Tuple {
            scope: 1,
            local: Ip4::UNSPECIFIED,
            remote: Ip4::UNSPECIFIED,
            local_port: port,
            remote_port: 0,
            protocol: 17,
            pad: [0; 3],
        };
        let flow = |slot| FlowRef {
            slot,
            generation: 1,
        };
        assert!(matches!(
            flows.insert(&tuple(1), &flow(1), Insert::Existing),
            Err(InsertError::Missing)
        ));
        flows.insert(&tuple(1), &flow(1), Insert::New).unwrap();
        assert!(matches!(
            flows.insert(&tuple(1), &flow(2), Insert::New),
            Err(InsertError::Exists)
        ));
        assert_eq!(flows.get(&tuple(1)).unwrap(), Some(flow(1)));
        assert!(flows.remove(&tuple(1)).unwrap());
        assert!(!flows.remove(&tuple(1)).unwrap());
        // Fill it: what was never refused is there, and the one too many is refused.
        for port in 0..8_192 {
            flows
                .insert(&tuple(port), &flow(port.into()), Insert::New)
                .unwrap();
        }
        assert!(matches!(
            flows.insert(&tuple(9_000), &flow(0), Insert::New),
            Err(InsertError::Full)
        ));
        let mut entries = flows.entries().unwrap();
        entries.sort_by_key(|(tuple, _)| tuple.local_port);
        let expected: Vec<_> = (0..8_192u16).map(|p| (tuple(p), flow(p.into()))).collect();
        assert_eq!(entries, expected);
    });
}

/// By BTF, which the maps get from the object.
#[test]
fn bpftool_names_the_fields_of_ipv6s_maps() {
    in_netns("bpftool_names_the_fields_of_ipv6s_maps", || {
        let datapath = datapath();
        let maps = datapath.maps();
        let address = |last| {
            let mut octets = [0xfd; 16];
            octets[15] = last;
            slipgate_abi::Ip6 { octets }
        };
        let tuple = slipgate_abi::Tuple6::of_words(7, (address(1), 40_000), (address(2), 443), 17);
        let flow = slipgate_abi::FlowRef {
            slot: 5,
            generation: 1,
        };
        let inserted = maps.flows6.insert(&tuple, &flow, Insert::New);
        inserted.unwrap();
        let path = |map: MapName| datapath.paths().pin(map.name()).display().to_string();
        let flows = crate::testing::run(&format!(
            "bpftool map dump pinned {}",
            path(MapName::Flows6)
        ));
        for field in [
            "\"scope\": 7",
            "\"local_port\": 40000",
            "\"octets\": [",
            "\"slot\": 5",
        ] {
            assert!(flows.contains(field), "{field}: {flows}");
        }
        for (map, fields) in [
            (MapName::Addresses6, ["guest", "remote", "nat"]),
            (
                MapName::Vms6,
                ["gateway_local", "guests", "neighbours_answered"],
            ),
        ] {
            let command = format!("bpftool map lookup pinned {} key 1 0 0 0", path(map));
            let element = crate::testing::run(&command);
            for field in fields {
                assert!(
                    element.contains(&format!("\"{field}\"")),
                    "{field}: {element}"
                );
            }
        }
    });
}

/// A start in another namespace removes lock directories that are empty.
#[test]
fn directories_are_made_while_others_remove_empty_ones() {
    let scratch = tempfile::tempdir().unwrap();
    let paths = Paths {
        pin_dir: scratch.path().join("pins"),
        run_dir: scratch.path().join("run"),
    };
    let is_done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
                let _ = std::fs::remove_dir(&paths.run_dir);
                std::thread::yield_now();
            }
        });
        for _ in 0..4_000 {
            let lock = create_and_lock(&paths);
            is_done.fetch_or(lock.is_err(), std::sync::atomic::Ordering::Relaxed);
            let _lock = lock.unwrap();
            assert!(paths.run_dir.join("lock").exists());
            paths.remove().unwrap();
        }
        is_done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}
