use super::*;
use crate::testing::{datapath, in_netns, vm_spec};
use crate::vm;

fn set(hops: &[(u32, &str)]) -> HashSet<(IfIndex, IpAddr)> {
    let hops = hops.iter();
    hops.map(|(ifindex, address)| (IfIndex::new(*ifindex), address.parse().unwrap()))
        .collect()
}

#[test]
fn a_successor_finds_the_next_hops_that_were_noted() {
    in_netns("noted_next_hops", || {
        let datapath = datapath();
        let (maps, paths) = (datapath.maps(), datapath.paths());
        let serve = |name: &str, hops: &[(u32, &str)]| {
            let owner = Owner::take(maps, paths, &[name]).unwrap();
            vm::open(maps, &owner, &vm_spec(name)).unwrap();
            assert_eq!(owner.noted_next_hops(paths), set(&[]));
            owner
                .note_next_hops(paths, &set(&[(9, "192.0.2.9")]))
                .unwrap();
            owner.note_next_hops(paths, &set(hops)).unwrap();
            owner
        };
        let a = serve("a", &[(7, "192.0.2.1"), (7, "2001:db8::1")]);
        let b = serve("b", &[(8, "192.0.2.1")]);
        drop((a, b));
        let both = Owner::take(maps, paths, &["a", "b"]).unwrap();
        let all = set(&[(7, "192.0.2.1"), (7, "2001:db8::1"), (8, "192.0.2.1")]);
        assert_eq!(both.noted_next_hops(paths), all);
        both.note_next_hops(paths, &set(&[(8, "192.0.2.1")]))
            .unwrap();
        both.forget_merged_next_hops(paths).unwrap();
        drop(both);
        let again = Owner::take(maps, paths, &["a"]).unwrap();
        assert_eq!(again.noted_next_hops(paths), set(&[(8, "192.0.2.1")]));
        again.forget_next_hops(paths).unwrap();
        assert_eq!(again.noted_next_hops(paths), set(&[]));
    });
}

#[test]
fn what_is_no_next_hop_is_not_read() {
    for line in ["", "7", "7 ", "x 192.0.2.1", "7 192.0.2", "-7 192.0.2.1"] {
        assert_eq!(hop(line), None, "{line:?}");
    }
    let it = hop("7 192.0.2.1").unwrap();
    assert_eq!(it, (IfIndex::new(7), [192, 0, 2, 1].into()));
}
