use std::os::fd::AsFd as _;

use super::*;
use crate::{
    Datapath, probe,
    testing::{attached_at, datapath, in_netns, make_tap, options, run},
};

/// Returns the programs at an interface's XDP hook, as the kernel lists them.
fn programs_at(interface: &str) -> String {
    run(&format!("bpftool net show dev {interface}"))
}

#[test]
fn pin_names_are_read_back() {
    for program in Program::ALL {
        for by in [AttachedBy::Link, AttachedBy::Clsact] {
            let attached = Attached {
                program,
                ifindex: IfIndex::new(4_000_000_000),
                by,
            };
            assert_eq!(
                Attached::from_pin_name(&attached.pin_name()),
                Some(attached)
            );
        }
    }
    for other in [
        "guest_egress",
        "FLOWS",
        "guest_egress-x",
        "nobody-3",
        "guard-3-tcx",
        "-3",
    ] {
        assert_eq!(Attached::from_pin_name(other), None, "{other}");
    }
}

#[test]
fn attaches_once_however_often_and_by_whomever() {
    in_netns("attaches_once_however_often_and_by_whomever", || {
        let (first, tap) = (datapath(), make_tap("t0"));
        first.attach(Program::GuestEgress, tap, Hook::Tcx).unwrap();
        first.attach(Program::GuestEgress, tap, Hook::Tcx).unwrap();
        let second = datapath();
        second.attach(Program::GuestEgress, tap, Hook::Tcx).unwrap();
        assert_eq!(attached_at("t0", Program::GuestEgress), 1);
        assert_eq!(second.attached().unwrap().len(), 1);

        // It outlives both.
        drop((first, second));
        assert_eq!(attached_at("t0", Program::GuestEgress), 1);

        let third = datapath();
        assert!(third.detach(Program::GuestEgress, tap).unwrap());
        assert!(!third.detach(Program::GuestEgress, tap).unwrap());
        assert_eq!(attached_at("t0", Program::GuestEgress), 0);
    });
}

#[test]
fn is_first_in_the_chain() {
    in_netns("is_first_in_the_chain", || {
        let (datapath, tap) = (datapath(), make_tap("t0"));
        let other = probe::pass_program().unwrap();
        let _link = bpf::link_create_tcx(other.as_fd(), tap, bpf::ChainPosition::First).unwrap();
        datapath
            .attach(Program::UplinkIngress, tap, Hook::Tcx)
            .unwrap();
        assert_eq!(bpf::tcx_programs(tap).unwrap().len(), 2);
        assert!(
            datapath
                .standing(Program::UplinkIngress, tap)
                .unwrap()
                .is_first()
        );
        let other = probe::pass_program().unwrap();
        let _before = bpf::link_create_tcx(other.as_fd(), tap, bpf::ChainPosition::First).unwrap();
        assert!(
            !datapath
                .standing(Program::UplinkIngress, tap)
                .unwrap()
                .is_first()
        );
    });
}

#[test]
fn clsact_attaches_once_replaces_and_detaches() {
    in_netns("clsact_attaches_once_replaces_and_detaches", || {
        let (datapath, tap) = (datapath(), make_tap("t0"));
        let filters = || run("tc filter show dev t0 ingress");
        datapath
            .attach(Program::GuestEgress, tap, Hook::Clsact)
            .unwrap();
        datapath
            .attach(Program::GuestEgress, tap, Hook::Clsact)
            .unwrap();
        assert_eq!(attached_at("t0", Program::GuestEgress), 1);
        let shown = filters();
        for part in ["pref 1 ", "handle 0x5347", "direct-action"] {
            assert!(shown.contains(part), "`{part}` in: {shown}");
        }
        // Another program's filter stays when ours is removed.
        let theirs = datapath.paths().pin("uplink_ingress");
        run(&format!(
            "tc filter add dev t0 ingress pref 7 bpf da pinned {}",
            theirs.display()
        ));
        drop(datapath);
        assert_eq!(attached_at("t0", Program::GuestEgress), 1);
        let datapath = crate::testing::datapath();
        assert!(datapath.detach(Program::GuestEgress, tap).unwrap());
        let shown = filters();
        assert!(
            !shown.contains("guest_egress") && shown.contains("pref 7"),
            "{shown}"
        );
    });
}

#[test]
fn moves_from_one_hook_to_the_other() {
    in_netns("moves_from_one_hook_to_the_other", || {
        let (datapath, tap) = (datapath(), make_tap("t0"));
        for (hook, by) in [
            (Hook::Clsact, AttachedBy::Clsact),
            (Hook::Tcx, AttachedBy::Link),
            (Hook::Clsact, AttachedBy::Clsact),
        ] {
            datapath.attach(Program::GuestEgress, tap, hook).unwrap();
            let attached = datapath.attached().unwrap();
            assert_eq!(attached.len(), 1);
            assert_eq!(attached[0].by, by);
            assert_eq!(attached_at("t0", Program::GuestEgress), 1);
        }
    });
}

/// Another build takes the place of the first under the pinned link: same link, other program.
#[test]
fn another_build_replaces_under_the_link() {
    in_netns("another_build_replaces_under_the_link", || {
        let (first, tap, clsact_tap) = (datapath(), make_tap("t0"), make_tap("t1"));
        first.attach(Program::GuestEgress, tap, Hook::Tcx).unwrap();
        first
            .attach(Program::GuestEgress, clsact_tap, Hook::Clsact)
            .unwrap();
        let link = || {
            let pin = first.paths().pin(&format!("guest_egress-{tap}"));
            let info = bpf::link_info(bpf::obj_get(&pin).unwrap().as_fd()).unwrap();
            (info.id, info.prog_id)
        };
        let before = link();

        // The same build changes nothing.
        drop(datapath());
        assert_eq!(link(), before);

        // Another one does.
        let path = first.paths().run_dir.join(crate::paths::BUILD_FILE);
        std::fs::write(path, "another").unwrap();
        let second = datapath();
        let after = link();
        assert_eq!(after.0, before.0, "the link is the same one");
        assert_ne!(after.1, before.1, "the program is another");
        let id = program_id_of(&second, Program::GuestEgress);
        assert_eq!(after.1, id);
        let shown = run("tc filter show dev t1 ingress");
        assert!(shown.contains(&format!("id {id} ")), "{shown}");
        let pinned = bpf::obj_get(&second.paths().pin("guest_egress")).unwrap();
        assert_eq!(program_id(pinned.as_fd()).unwrap(), id);

        // The logging build is always another.
        let third = Datapath::open(&crate::LoadOptions {
            bpf_log: true,
            ..options()
        })
        .unwrap();
        assert_eq!(
            link(),
            (before.0, program_id_of(&third, Program::GuestEgress))
        );
    });
}

fn program_id_of(datapath: &Datapath, program: Program) -> u32 {
    program_id(datapath.program(program).unwrap()).unwrap()
}

#[test]
fn guard_attaches_in_both_modes() {
    in_netns("guard_attaches_in_both_modes", || {
        let (datapath, tap) = (datapath(), make_tap("t0"));
        datapath.attach_guard(tap, XdpMode::Generic).unwrap();
        assert!(
            programs_at("t0").contains("generic"),
            "{}",
            programs_at("t0")
        );
        assert!(datapath.detach(Program::Guard, tap).unwrap());
        datapath.attach_guard(tap, XdpMode::Native).unwrap();
        assert!(
            programs_at("t0").contains("driver"),
            "{}",
            programs_at("t0")
        );
        datapath.attach_guard(tap, XdpMode::Native).unwrap();
        assert!(datapath.detach(Program::Guard, tap).unwrap());
    });
}

#[test]
fn a_link_whose_interface_is_gone_is_removed() {
    in_netns("a_link_whose_interface_is_gone_is_removed", || {
        let datapath = datapath();
        let (tap, other) = (make_tap("t0"), make_tap("t1"));
        datapath
            .attach(Program::GuestEgress, tap, Hook::Tcx)
            .unwrap();
        datapath
            .attach(Program::GuestEgress, other, Hook::Tcx)
            .unwrap();
        assert_eq!(datapath.remove_defunct().unwrap(), 0);
        run("ip link del t0");
        assert_eq!(datapath.remove_defunct().unwrap(), 1);
        let left = datapath.attached().unwrap();
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].ifindex, other);
        // One index, again, while the old pin is still there.
        run("ip link del t1");
        run(&format!(
            "ip link add t1 index {other} type veth peer name t2"
        ));
        datapath
            .attach(Program::GuestEgress, other, Hook::Tcx)
            .unwrap();
        assert_eq!(attached_at("t1", Program::GuestEgress), 1);
    });
}

#[test]
fn an_interface_that_is_not_there_is_named() {
    in_netns("an_interface_that_is_not_there_is_named", || {
        let text = datapath()
            .attach(Program::GuestEgress, IfIndex::new(4_711), Hook::Tcx)
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("guest_egress") && text.contains("4711"),
            "{text}"
        );
    });
}
