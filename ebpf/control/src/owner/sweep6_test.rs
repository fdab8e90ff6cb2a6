use slipgate_abi::{Addresses6, Ip6, Tuple6, slot::SlotFlags};

use super::*;

#[test]
fn the_sweep_removes_half_pairs_of_ipv6_of_the_dead_only() {
    let test = "the_sweep_removes_half_pairs_of_ipv6_of_the_dead_only";
    in_netns(test, || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let take = |names: &[&str]| Owner::take(maps, datapath.paths(), names).unwrap();
        let insert = |tuple: Tuple6, slot, generation| {
            let flow = FlowRef { slot, generation };
            maps.flows6.insert(&tuple, &flow, Insert::New).unwrap();
            tuple
        };
        let address = |last| {
            let mut octets = [0xfd; 16];
            octets[15] = last;
            Ip6 { octets }
        };
        let pair = |index: u32, port, verdict| {
            let slot = slot_of(maps, index);
            fill(slot, 5, port, verdict);
            // SAFETY: a mapped slot that no other thread uses.
            unsafe { (*slot.as_ptr()).flags = SlotFlags::IPV6 };
            let addresses = maps.addresses6(SlotIndex::new(index)).unwrap();
            addresses.set(Addresses6 {
                guest: address(1),
                remote: address(2),
                nat: address(3),
                pad: [0; 16],
            });
            [
                insert(addresses.guest_tuple(slot), index, 5),
                insert(addresses.world_tuple(slot), index, 5),
            ]
        };
        let (dead, living) = (take(&["a"]), take(&["b"]));
        vm::open(maps, &dead, &vm_spec("a")).unwrap();
        let (dead_chunk, living_chunk) = (
            maps.claim_chunk(dead.row(), 0).unwrap().0,
            maps.claim_chunk(living.row(), 0).unwrap().0,
        );
        drop(dead);

        let mut kept = pair(dead_chunk.start, 1, Verdict::Fast).to_vec();
        kept.extend(pair(dead_chunk.start + 1, 2, Verdict::Closing));
        kept.extend(pair(living_chunk.start, 3, Verdict::Free));
        let mut gone = pair(dead_chunk.start + 2, 4, Verdict::Free).to_vec();
        let used_again = kept[1];
        // Other ports, another peer, another generation.
        for (port, remote, generation) in [(5, 2, 5), (1, 9, 5), (6, 2, 4)] {
            let tuple = Tuple6 {
                local_port: port,
                remote: address(remote),
                ..used_again
            };
            gone.push(insert(tuple, dead_chunk.start, generation));
        }
        // A slot that has a flow of IPv4.
        let slot = slot_of(maps, dead_chunk.start + 3);
        let pair_of_ipv4 = pair(dead_chunk.start + 3, 7, Verdict::Fast);
        // SAFETY: as above.
        unsafe { (*slot.as_ptr()).flags = 0 };
        gone.extend(pair_of_ipv4);

        let other = take(&["c"]);
        let sweep_for = |owner: &Owner| sweep(maps, datapath.paths(), [owner], PATIENCE).unwrap();
        {
            let adopter = take(&["a"]);
            assert_eq!(sweep_for(&adopter), Swept::default(), "its engine does it");
        }
        assert_eq!(sweep_for(&other).tuples, gone.len());
        for tuple in kept {
            assert!(maps.flows6.get(&tuple).unwrap().is_some(), "{tuple:?}");
        }
        for tuple in gone {
            assert!(maps.flows6.get(&tuple).unwrap().is_none(), "{tuple:?}");
        }
        assert_eq!(sweep_for(&other), Swept::default());
    });
}
