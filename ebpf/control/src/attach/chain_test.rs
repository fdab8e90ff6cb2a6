use super::*;
use crate::{
    Datapath, Hook, probe, serve,
    testing::{attached_at, datapath, in_netns, make_tap, run},
};

const UPLINK: Program = Program::UplinkIngress;

/// Attaches a program of somebody else's in front. It stays there until the link is dropped.
fn come_in_front(ifindex: IfIndex) -> OwnedFd {
    let other = probe::pass_program().unwrap();
    bpf::link_create_tcx(other.as_fd(), ifindex, bpf::ChainPosition::First).unwrap()
}

fn id_of(link: &OwnedFd) -> u32 {
    bpf::link_info(link.as_fd()).unwrap().prog_id
}

fn behind(datapath: &Datapath, program: Program, ifindex: IfIndex) -> Vec<String> {
    match datapath.standing(program, ifindex).unwrap() {
        Standing::Behind(before) => before.iter().map(ToString::to_string).collect(),
        other => panic!("{other}"),
    }
}

#[test]
fn a_link_moves_in_front_of_others_as_often_as_they_come() {
    in_netns("a_link_moves_in_front_of_others", || {
        let (datapath, uplink) = (datapath(), make_tap("up0"));
        datapath.attach(UPLINK, uplink, Hook::Tcx).unwrap();
        assert!(datapath.standing(UPLINK, uplink).unwrap().is_first());
        let mut theirs = Vec::new();
        for turn in 1..=4 {
            theirs.push(come_in_front(uplink));
            let id = id_of(&theirs[turn - 1]).to_string();
            let before = behind(&datapath, UPLINK, uplink);
            assert!(
                before.len() == 1 && before[0].contains(&id),
                "{before:?}, not {id}"
            );
            datapath.move_to_front(UPLINK, uplink).unwrap();
            assert!(datapath.standing(UPLINK, uplink).unwrap().is_first());
            assert_eq!(attached_at("up0", UPLINK), 1);
            assert_eq!(bpf::tcx_programs(uplink).unwrap().len(), turn + 1);
            assert_eq!(datapath.attached().unwrap().len(), 1);
            // The twin was there meanwhile only.
            let pin = datapath.paths().pin(&format!("uplink_ingress-{uplink}"));
            let program = program_id(datapath.program(UPLINK).unwrap()).unwrap();
            assert_eq!(link::program_at(&pin, uplink), Some(program));
        }
        // A process died before its new link had the pin's place: the next move goes on from there.
        let pins = datapath.paths().pin_dir.clone();
        let pin = pins.join(format!("uplink_ingress-{uplink}"));
        let spare = link::has_program(
            bpf::obj_get(&pin).unwrap().as_fd(),
            &pin,
            datapath.program(UPLINK).unwrap(),
        );
        let spare = match spare.unwrap() {
            true => datapath.twin(UPLINK).unwrap(),
            false => datapath.program(UPLINK).unwrap(),
        };
        let left = bpf::link_create_tcx(spare, uplink, bpf::ChainPosition::First).unwrap();
        bpf::obj_pin(left.as_fd(), &link::successor_pin(&pin)).unwrap();
        drop(left);
        assert_eq!(bpf::tcx_programs(uplink).unwrap().len(), theirs.len() + 2);
        theirs.push(come_in_front(uplink));
        datapath.move_to_front(UPLINK, uplink).unwrap();
        assert!(datapath.standing(UPLINK, uplink).unwrap().is_first());
        assert_eq!(bpf::tcx_programs(uplink).unwrap().len(), theirs.len() + 1);
        assert!(!link::successor_pin(&pin).exists());
        // The pin is that of the link which runs: another process detaches by it.
        drop(datapath);
        let datapath = crate::testing::datapath();
        assert!(datapath.standing(UPLINK, uplink).unwrap().is_first());
        assert!(datapath.detach(UPLINK, uplink).unwrap());
        assert_eq!(attached_at("up0", UPLINK), 0);
        assert_eq!(bpf::tcx_programs(uplink).unwrap().len(), theirs.len());
    });
}

#[test]
fn a_move_that_the_kernel_refuses_leaves_the_program_where_it_is() {
    in_netns("a_move_that_the_kernel_refuses", || {
        // As many as Linux lets be attached at a place.
        const MOST: usize = 63;
        let (datapath, uplink) = (datapath(), make_tap("up0"));
        datapath.attach(UPLINK, uplink, Hook::Tcx).unwrap();
        let mut theirs: Vec<_> = (1..MOST).map(|_| come_in_front(uplink)).collect();
        let before = bpf::tcx_programs(uplink).unwrap();
        assert_eq!(before.len(), MOST);
        let refused = datapath.move_to_front(UPLINK, uplink).unwrap_err();
        let text = refused.to_string();
        assert!(
            text.contains("attach uplink_ingress to up0: make a link in front"),
            "{text}"
        );
        assert_eq!(bpf::tcx_programs(uplink).unwrap(), before);
        assert_eq!(behind(&datapath, UPLINK, uplink).len(), MOST - 1);
        // Once there is room, the next try moves it.
        bpf::link_detach(theirs.pop().unwrap().as_fd()).unwrap();
        datapath.move_to_front(UPLINK, uplink).unwrap();
        assert!(datapath.standing(UPLINK, uplink).unwrap().is_first());
        assert_eq!(bpf::tcx_programs(uplink).unwrap().len(), MOST - 1);
    });
}

#[test]
fn a_filter_behind_others_becomes_a_link_in_front() {
    in_netns("a_filter_behind_others_becomes_a_link", || {
        let datapath = datapath();
        let theirs = datapath.paths().pin("engine_port").display().to_string();
        for (tap, name, by_filter) in [(make_tap("t0"), "t0", true), (make_tap("t1"), "t1", false)]
        {
            serve::serve_tap(&datapath, tap, Hook::Clsact).unwrap();
            let egress = Program::GuestEgress;
            assert!(datapath.standing(egress, tap).unwrap().is_first());
            let mut link = None;
            match by_filter {
                true => {
                    // At one priority, the filter that came last runs first.
                    run(&format!(
                        "tc filter add dev {name} ingress pref 1 bpf da pinned {theirs}"
                    ));
                    let before = behind(&datapath, egress, tap);
                    assert_eq!(before, ["the tc filter bpf with pref 1"]);
                }
                false => {
                    link = Some(come_in_front(tap));
                    assert_eq!(behind(&datapath, egress, tap).len(), 1);
                }
            }
            datapath.move_to_front(egress, tap).unwrap();
            assert!(datapath.standing(egress, tap).unwrap().is_first());
            assert_eq!(attached_at(name, egress), 1);
            assert_eq!(attached_at(name, Program::GuestShut), 1);
            drop(link);
        }
        // Theirs with a later priority are behind.
        let tap = make_tap("t2");
        serve::serve_tap(&datapath, tap, Hook::Clsact).unwrap();
        run(&format!(
            "tc filter add dev t2 ingress pref 2 bpf da pinned {theirs}"
        ));
        assert!(
            datapath
                .standing(Program::GuestEgress, tap)
                .unwrap()
                .is_first()
        );
    });
}

#[test]
fn what_somebody_detached_is_missing_and_comes_back() {
    in_netns("what_somebody_detached_is_missing", || {
        let datapath = datapath();
        for (name, hook) in [("t0", Hook::Tcx), ("t1", Hook::Clsact)] {
            let tap = make_tap(name);
            datapath.attach(UPLINK, tap, hook).unwrap();
            match hook {
                Hook::Tcx => {
                    let pin = datapath.paths().pin(&format!("uplink_ingress-{tap}"));
                    bpf::link_detach(open(&pin).unwrap().as_fd()).unwrap();
                }
                Hook::Clsact => drop(run("tc qdisc del dev t1 clsact")),
            }
            assert_eq!(datapath.standing(UPLINK, tap).unwrap(), Standing::Missing);
            datapath.move_to_front(UPLINK, tap).unwrap();
            assert!(datapath.standing(UPLINK, tap).unwrap().is_first());
            assert_eq!(attached_at(name, UPLINK), 1);
        }
    });
}

#[test]
fn a_process_that_serves_nothing_sees_the_places_and_names() {
    in_netns("a_process_that_serves_nothing_sees_the_places", || {
        let datapath = datapath();
        let (uplink, tap) = (make_tap("up0"), make_tap("t0"));
        datapath.attach(UPLINK, uplink, Hook::Tcx).unwrap();
        serve::serve_tap(&datapath, tap, Hook::Clsact).unwrap();
        let paths = datapath.paths().clone();
        let fd = datapath.program(Program::EnginePort).unwrap();
        let _theirs = bpf::link_create_tcx(fd, uplink, bpf::ChainPosition::First).unwrap();
        let found = examine(&paths).unwrap();
        let [(first, _, of_tap), (second, _, of_uplink)] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!((&**first, &**second), ("t0", "up0"));
        assert!(of_tap.is_first(), "{of_tap}");
        let text = of_uplink.to_string();
        assert!(
            text.contains("runs behind the tcx program engine_port (id "),
            "{text}"
        );
    });
}
