use super::*;
use crate::testing::{datapath, in_netns, vm_spec};
use crate::vm;

fn set(taps: &[u32]) -> BTreeSet<IfIndex> {
    taps.iter().copied().map(IfIndex::new).collect()
}

#[test]
fn a_successor_finds_the_taps_that_were_noted_but_those_of_the_living() {
    in_netns("noted_taps", || {
        let datapath = datapath();
        let (maps, paths) = (datapath.maps(), datapath.paths());
        let serve = |name: &str, taps: &[u32]| {
            let owner = Owner::take(maps, paths, &[name]).unwrap();
            vm::open(maps, &owner, &vm_spec(name)).unwrap();
            owner.note_taps(paths, set(taps)).unwrap();
            owner
        };
        let (a, b) = (serve("a", &[7, 8]), serve("b", &[9]));
        // Another process serves one of them since a has died.
        drop(a);
        let lives = serve("c", &[8, 10]);
        drop(b);
        // What the rows say is not looked at.
        for row in maps.vm_rows() {
            maps.vm(row)
                .unwrap()
                .tap_ifindex()
                .store(1, std::sync::atomic::Ordering::Release);
        }
        let both = Owner::take(maps, paths, &["a", "b"]).unwrap();
        assert_eq!(both.noted_taps(paths).unwrap(), set(&[7, 9]));
        both.note_taps(paths, set(&[9])).unwrap();
        both.forget_merged_taps(paths).unwrap();
        drop(both);
        let again = Owner::take(maps, paths, &["a"]).unwrap();
        assert_eq!(again.noted_taps(paths).unwrap(), set(&[9]));
        again.forget_taps(paths).unwrap();
        assert_eq!(again.noted_taps(paths).unwrap(), set(&[]));
        drop(lives);
    });
}

#[test]
fn a_change_appends_a_line_and_the_record_stays_short() {
    in_netns("a_change_appends_a_line", || {
        let datapath = datapath();
        let (maps, paths) = (datapath.maps(), datapath.paths());
        let owner = Owner::take(maps, paths, &[]).unwrap();
        let mut noted = owner.note_taps(paths, set(&[1, 2])).unwrap();
        let text = || fs::read_to_string(path(&paths.run_dir, owner.row())).unwrap();
        let read = || owner.noted_taps(paths).unwrap();
        noted.add(IfIndex::new(3)).unwrap();
        noted.add(IfIndex::new(3)).unwrap();
        noted.remove(IfIndex::new(1)).unwrap();
        noted.remove(IfIndex::new(1)).unwrap();
        assert_eq!(text(), "1\n2\n3\n-1\n");
        assert_eq!(read(), set(&[2, 3]));

        // One that is served again counts.
        noted.add(IfIndex::new(1)).unwrap();
        assert_eq!(read(), set(&[1, 2, 3]));
        for index in 4..10_000 {
            noted.add(IfIndex::new(index)).unwrap();
            noted.remove(IfIndex::new(index)).unwrap();
            assert!(text().lines().count() <= FEW_LINES + 1);
        }
        assert_eq!(read(), set(&[1, 2, 3]));

        // Of a process that died while it wrote: 77 may have been 771.
        fs::write(path(&paths.run_dir, owner.row()), "1\n2\n77").unwrap();
        assert_eq!(read(), set(&[1, 2]));
    });
}
