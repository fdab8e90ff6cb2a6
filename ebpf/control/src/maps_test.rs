use std::{collections::HashSet, env, io, os::fd::AsRawFd, process::Command};

use slipgate_abi::{
    DropReason, Ip4, RuleIndex, SlotIndex, VmRow,
    count::drop_packet,
    early_fragment::{EARLY_CLAIMS, PLACES},
    first_packet::RING_LEN,
    maps::{MAX_OWNERS, RuleFlags},
};

use super::*;
use crate::{
    bpf,
    layout::MAPS,
    testing::{datapath, in_netns, maps_only},
};

const FDS: &str = "SLIPGATE_TEST_FDS";
const CLAIMS: &str = "SLIPGATE_TEST_CLAIMS";

fn tuple(port: u16) -> Tuple {
    Tuple {
        scope: 1,
        local: Ip4 {
            octets: [10, 0, 2, 15],
        },
        remote: Ip4 {
            octets: [192, 0, 2, 1],
        },
        local_port: port,
        remote_port: 443,
        protocol: 6,
        pad: [0; 3],
    }
}

fn flow(slot: u32) -> FlowRef {
    FlowRef {
        slot,
        generation: 1,
    }
}

#[test]
fn what_a_rule_refused_is_not_its_successors() {
    in_netns("what_a_rule_refused_is_not_its_successors", || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let counters = maps.counters(VmRow::new(7)).unwrap();
        // SAFETY: a row that no other thread uses.
        let row = unsafe { &mut *counters };
        for (place, rule, flows) in [(0, 3, 10), (1, 4, 20), (2, 9, 40)] {
            row.refused_by_rule[place].rule = rule + 1;
            row.refused_by_rule[place].flows = flows;
        }
        maps.forget_refusals_by(|rule| (3..9).contains(&rule));
        assert_eq!(row.refused_by_other_rules, 30);
        let left = row.refused_by_rule.map(|by| (by.rule, by.flows));
        assert_eq!(left[..4], [(0, 0), (0, 0), (10, 40), (0, 0)]);
    });
}

#[test]
fn a_process_without_capability_uses_what_it_was_handed() {
    in_netns(
        "a_process_without_capability_uses_what_it_was_handed",
        || {
            let datapath = maps_only();
            let maps = datapath.maps();
            maps.flows.insert(&tuple(1), &flow(1), Insert::New).unwrap();
            maps.set_rule(RuleIndex::new(3), RuleElement::FREE, "allow any");
            // Without close-on-exec, so that the child has them.
            let numbers: Vec<_> = maps
                .fds()
                .into_iter()
                // SAFETY: duplicates an open descriptor.
                .map(|fd| unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD, 100) })
                .collect();
            let list: Vec<_> = numbers.iter().map(ToString::to_string).collect();
            let output = Command::new(env::current_exe().unwrap())
                .args([
                    "--ignored",
                    "--exact",
                    "maps::tests::without_capability",
                    "--nocapture",
                ])
                .env(FDS, list.join(","))
                .output()
                .unwrap();
            for number in numbers {
                // SAFETY: our own descriptors, not used any more.
                unsafe { libc::close(number) };
            }
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && said.contains("1 passed"),
                "{said}{}",
                String::from_utf8_lossy(&output.stderr)
            );
            assert_eq!(maps.flows.get(&tuple(1)).unwrap(), None);
            assert_eq!(maps.flows.get(&tuple(2)).unwrap(), Some(flow(2)));
            let slot = maps.slot(SlotIndex::new(7)).unwrap();
            assert_eq!(slot.tx_packets().load(Acquire), 77);
            assert!(maps.chunks_of(4).into_iter().eq(std::iter::once(0..1_024)));
            assert_eq!(rule_text(maps, 4), "deny any");
            let read = ReadOnlyMaps::open_pinned(&datapath.paths().pin_dir).unwrap();
            assert_eq!(read.drops(VmRow::new(2)).unwrap().denied.bytes, 60);
            assert_eq!(read.rule(RuleIndex::new(4)).unwrap(), "deny any");
        },
    );
}

fn rule_text(maps: &SharedMaps, index: u32) -> String {
    text_of(&maps.rule_element(RuleIndex::new(index)).unwrap().text)
}

/// Makes this process one of another user, as an engine is.
fn give_up_capabilities() {
    const NOBODY: u32 = 65_534;
    // SAFETY: plain numbers; for all threads of the process.
    unsafe {
        assert_eq!(libc::setresgid(NOBODY, NOBODY, NOBODY), 0);
        assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
    }
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
}

#[test]
#[ignore = "the child of a_process_without_capability_uses_what_it_was_handed"]
fn without_capability() {
    give_up_capabilities();
    assert!(
        crate::probe::pass_program().is_err(),
        "a program was loaded"
    );

    let fds = env::var(FDS)
        .unwrap()
        .split(',')
        // SAFETY: handed over for us alone.
        .map(|number| unsafe { std::os::fd::FromRawFd::from_raw_fd(number.parse().unwrap()) })
        .collect();
    let maps = SharedMaps::from_fds(fds).unwrap();
    assert_eq!(maps.flows.entries().unwrap(), [(tuple(1), flow(1))]);
    assert!(maps.flows.remove(&tuple(1)).unwrap());
    maps.flows.insert(&tuple(2), &flow(2), Insert::New).unwrap();
    maps.slot(SlotIndex::new(7))
        .unwrap()
        .tx_packets()
        .fetch_add(77, std::sync::atomic::Ordering::AcqRel);
    assert_eq!(maps.claim_chunk(4, 0), Some((0..1_024, true)));
    let drops = maps.drops(VmRow::new(2)).unwrap();
    // SAFETY: a mapped row.
    unsafe { drop_packet(drops, DropReason::Denied, 1, 60) };
    assert_eq!(rule_text(&maps, 3), "allow any");
    let element = RuleElement {
        meaning: [3; 16],
        whole: [4; 16],
        flags: RuleFlags::LEARNING,
        ..RuleElement::FREE
    };
    let long = "x".repeat(200);
    assert!(maps.set_rule(RuleIndex::new(5), element, &long));
    assert_eq!(rule_text(&maps, 5), long[..128]);
    let found = maps.rule_element(RuleIndex::new(5)).unwrap();
    let text = found.text;
    assert_eq!(found, RuleElement { text, ..element });
    assert!(maps.set_rule(RuleIndex::new(4), RuleElement::FREE, "deny any"));
}

#[test]
fn descriptors_in_another_order_are_refused() {
    in_netns("descriptors_in_another_order_are_refused", || {
        let datapath = maps_only();
        let mut fds: Vec<_> = datapath
            .maps()
            .fds()
            .into_iter()
            .map(|fd| fd.try_clone_to_owned().unwrap())
            .collect();
        fds.swap(MapName::Vms as usize, MapName::Drops as usize);
        let error = SharedMaps::from_fds(fds).unwrap_err();
        assert!(
            matches!(error, Error::Descriptor { map: "VMS", .. }),
            "{error}"
        );
        let error = SharedMaps::from_fds(vec![std::fs::File::open("/dev/null").unwrap().into()]);
        assert!(matches!(error, Err(Error::Descriptor { .. })));
        let files = (0..MAPS).map(|_| std::fs::File::open("/dev/null").unwrap().into());
        let error = SharedMaps::from_fds(files.collect());
        assert!(matches!(error, Err(Error::Descriptor { .. })));
    });
}

#[test]
fn nothing_is_handed_out_beyond_the_end() {
    in_netns("nothing_is_handed_out_beyond_the_end", || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let last = maps.slots() - 1;
        let slot = |index| maps.slot(SlotIndex::new(index));
        assert!(slot(last).is_some() && slot(last + 1).is_none());
        let sizes = maps.sizes();
        let rows = sizes.vms as u16 + 1;
        let vm = |row| maps.vm(VmRow::new(row));
        assert!(vm(rows - 1).is_some() && vm(rows).is_none());
        assert!(maps.next_hop(maps::MAX_NEXT_HOPS).is_none());
        assert!(maps.drops(VmRow::new(rows)).is_none());
        assert!(maps.counters(VmRow::new(u16::MAX)).is_none());
        let rule = RuleIndex::new(sizes.rules);
        assert!(!maps.set_rule(rule, RuleElement::FREE, "x"));
        assert!(maps.rule_element(rule).is_none());
    });
}

const SECOND_NS: u64 = 1_000_000_000;

#[test]
fn chunks_are_claimed_once_and_the_last_is_kept_for_another() {
    in_netns(
        "chunks_are_claimed_once_and_the_last_is_kept_for_another",
        || {
            let datapath = maps_only();
            let maps = datapath.maps();
            // However many claim at once.
            let claimed: Vec<_> = std::thread::scope(|scope| {
                let claim = || scope.spawn(|| [maps.claim_chunk(1, 0), maps.claim_chunk(1, 0)]);
                [claim(), claim()].map(|thread| thread.join().unwrap())
            })
            .into_iter()
            .flatten()
            .flatten()
            .collect();
            let starts: HashSet<_> = claimed.iter().map(|(chunk, _)| chunk.start).collect();
            assert_eq!(starts.len(), claimed.len());
            assert!(claimed.len() <= 3);
            // Claims that met may all have been refused.
            while maps.chunks_of(1).len() < 3 {
                assert!(maps.claim_chunk(1, 0).is_some());
            }
            assert_eq!(maps.claim_chunk(1, 0), None);
            assert!(maps.claim_chunk(2, 0).is_some());
            assert_eq!(maps.claim_chunk(2, 0), None);
        },
    );
}

/// Maps the same maps again, as another process does.
fn mapped_again(maps: &SharedMaps) -> SharedMaps {
    let fds = maps.fds().into_iter();
    SharedMaps::from_fds(fds.map(|fd| fd.try_clone_to_owned().unwrap()).collect()).unwrap()
}

#[test]
fn a_chunk_goes_back_and_is_anothers_with_its_generations() {
    in_netns(
        "a_chunk_goes_back_and_is_anothers_with_its_generations",
        || {
            let datapath = maps_only();
            let first = datapath.maps();
            let second = &mapped_again(first);
            let now_ns = 1_000 * SECOND_NS;
            for _ in 0..3 {
                assert!(
                    first
                        .claim_chunk(1, now_ns)
                        .is_some_and(|(_, rested)| rested)
                );
            }
            let slot = SlotIndex::new(1_024);
            first.slot(slot).unwrap().generation().store(7, Release);
            assert!(!first.release_chunk(2, slot, now_ns), "it is another's");
            assert!(first.release_chunk(1, slot, now_ns));
            assert!(!first.release_chunk(1, slot, now_ns), "once");
            assert_eq!(first.chunks_of(1).len(), 2);
            // One that has rested is taken before one that has not.
            assert_eq!(second.claim_chunk(2, now_ns), Some((3_072..4_096, true)));
            assert_eq!(first.claim_chunk(1, now_ns), None, "it has its part");
            assert_eq!(second.claim_chunk(2, now_ns), None);
            // A third finds what the first gave back.
            let later_ns = now_ns + 2 * SECOND_NS;
            assert_eq!(second.claim_chunk(3, later_ns), Some((1_024..2_048, true)));
            let generation = second.slot(slot).unwrap().generation().load(Acquire);
            assert_eq!(generation, 7);
        },
    );
}

#[test]
fn what_was_given_back_just_now_has_not_rested() {
    in_netns("what_was_given_back_just_now_has_not_rested", || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let now_ns = 1_000 * SECOND_NS + 999_999_999;
        let all: Vec<_> = (1..=4).filter_map(|row| maps.claim_chunk(row, 0)).collect();
        assert_eq!(all.len(), 4);
        assert!(maps.release_chunk(1, SlotIndex::new(0), now_ns));
        assert_eq!(maps.claim_chunk(5, now_ns + 2), Some((0..1_024, false)));
    });
}

/// More entries than one batch, and than a bucket's worth.
#[test]
fn a_trie_is_read_whole() {
    in_netns("a_trie_is_read_whole", || {
        let datapath = maps_only();
        let deny = &datapath.maps().deny;
        let prefix = |number: u32| DenyPrefix {
            prefix_len: 64,
            key: DenyKey {
                policy: [0; 4],
                remote: Ip4 {
                    octets: number.to_be_bytes(),
                },
            },
        };
        for number in 0..10_000 {
            deny.insert(&prefix(number), &number, Insert::New).unwrap();
        }
        let mut rules: Vec<_> = deny
            .entries()
            .unwrap()
            .into_iter()
            .map(|(_, rule)| rule)
            .collect();
        rules.sort_unstable();
        assert!(rules.into_iter().eq(0..10_000));
        assert_eq!(deny.get(&prefix(7)).unwrap(), Some(7));
        assert_eq!(deny.remove_if(|_, rule| *rule >= 10).unwrap(), 9_990);
    });
}

/// They have guests' packets, which brokers and the processes that show tables are not to have.
#[test]
fn rings_of_first_packets_are_there_for_who_maps_them_alone() {
    in_netns(
        "rings_of_first_packets_are_there_for_who_maps_them_alone",
        || {
            let datapath = maps_only();
            let maps = datapath.maps();
            assert!(maps.first_packet(0).is_none());
            assert!(maps.early_fragment(0).is_none() && maps.early_tag(0).is_none());
            maps.map_packets().unwrap();
            let last = MAX_OWNERS * RING_LEN - 1;
            assert!(maps.first_packet(last).is_some_and(|place| !place.has(0)));
            assert!(maps.first_packet(last + 1).is_none());
            assert!(maps.early_tag(PLACES - 1).is_some() && maps.early_tag(PLACES).is_none());
            assert!(maps.early_fragment(PLACES - 1).is_some());
            assert!(maps.early_fragment(PLACES).is_none());
        },
    );
}

/// An engine has the descriptors of all shared maps ([`SharedMaps::fds`]), a user of its own and no
/// capability.
#[test]
fn no_engine_has_the_claims_of_early_fragments() {
    in_netns("no_engine_has_the_claims_of_early_fragments", || {
        let datapath = datapath();
        let path = datapath.paths().pin(EARLY_CLAIMS);
        let claims = bpf::obj_get(&path).unwrap();
        let id = bpf::map_info(claims.as_fd()).unwrap().id;
        // By none of its descriptors.
        let fds = datapath.maps().fds();
        let ids = fds.into_iter().map(|fd| bpf::map_info(fd).unwrap().id);
        let ids: HashSet<u32> = ids.collect();
        assert!(ids.len() == MAPS && !ids.contains(&id));
        // Nor does it get one: by the map's number, as root does here, or by its pin.
        let by_id = bpf::map_by_id(id).unwrap();
        assert_eq!(bpf::map_info(by_id.as_fd()).unwrap().id, id);
        let output = Command::new(env::current_exe().unwrap())
            .args(["--ignored", "--exact", "maps::tests::gets_no_claims"])
            .arg("--nocapture")
            .env(CLAIMS, format!("{id} {}", path.display()))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    });
}

#[test]
#[ignore = "the child of no_engine_has_the_claims_of_early_fragments"]
fn gets_no_claims() {
    let claims = env::var(CLAIMS).unwrap();
    let (id, path) = claims.split_once(' ').unwrap();
    give_up_capabilities();
    let refused = |opened: io::Result<OwnedFd>| opened.unwrap_err().raw_os_error();
    assert_eq!(
        refused(bpf::map_by_id(id.parse().unwrap())),
        Some(libc::EPERM)
    );
    assert_eq!(refused(bpf::obj_get(Path::new(path))), Some(libc::EACCES));
}

#[test]
fn text_is_cut_on_a_character_boundary() {
    let mut field = [0xff; 4];
    fill_text(&mut field, "abcé");
    assert_eq!(&field, b"abc\0");
    assert_eq!(text_of(&field), "abc");
    fill_text(&mut field, "abcd");
    assert_eq!(text_of(&field), "abcd");
}
