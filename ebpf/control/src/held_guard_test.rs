use super::*;
use crate::{
    attach::{XdpMode, program_id},
    bpf,
    testing::{datapath, in_netns, make_tap},
};

#[test]
fn the_guard_stays_held_where_nobody_sees_it() {
    in_netns("the_guard_stays_held_where_nobody_sees_it", || {
        let datapath = datapath();
        let held = HeldGuard::of(&datapath).unwrap();
        let program = datapath.program(Program::Guard).unwrap();
        let program = program_id(program).unwrap();
        // The program's id, and whether it is at a device.
        let found = || {
            let info = bpf::link_info(held.link()).unwrap();
            // SAFETY: the union's field for a link by XDP.
            let ifindex = unsafe { info.__bindgen_anon_1.xdp.ifindex };
            (info.prog_id, ifindex != 0)
        };
        assert_eq!(found(), (program, true));
        assert!(Device::named("guard").is_err(), "in another namespace");
        let tap = make_tap("t0");
        datapath.attach_guard(tap, XdpMode::Native).unwrap();
        assert!(datapath.detach(Program::Guard, tap).unwrap());
        assert_eq!(found(), (program, true));
    });
}
