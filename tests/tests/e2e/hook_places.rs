//! Others' programs at slipgate's hooks: noticed, said, and the place taken back.

use std::{
    io::ErrorKind,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use serde_json::json;
use slipgate_testbed::{
    NetNs,
    clients::{tcp, udp, udp::UdpOutcome},
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    tcx,
    world::{UPLINK, WORLD_LINK},
};

use crate::{BRIEFLY, Cell, WAIT, api, matrix::matrix};

matrix! {
    who_comes_in_front_is_noticed_and_the_place_taken_back: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "slipgate has no program in the kernel there";
}

/// The broker looks every ten seconds.
const LOOKS: Duration = Duration::from_secs(20);

fn within_a_look<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LOOKS;
    loop {
        if let Some(found) = f() {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {LOOKS:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Somebody's tcx program on the uplink keeps everything from slipgate until that is first again;
/// somebody's filter on a TAP likewise, which the kernel tells of.
fn who_comes_in_front_is_noticed_and_the_place_taken_back(cell: Cell) {
    let stand = api::Stand::of(cell, &[]);
    let world = stand.world();
    // What comes in front drops ARP and neighbour discovery, too, and the host needs some.
    let mac = |net: &NetNs, device: &str| {
        let link = net.ip(&format!("-br link show {device}")).unwrap();
        link.split_whitespace().nth(2).unwrap().to_owned()
    };
    for (net, device, address, peer) in [
        (
            &world.host,
            UPLINK,
            cell.router(),
            mac(&world.net, WORLD_LINK),
        ),
        (
            &world.net,
            WORLD_LINK,
            cell.host(),
            mac(&world.host, UPLINK),
        ),
    ] {
        let neighbour = format!("{address} lladdr {peer} dev {device} nud permanent");
        net.ip(&format!("neigh replace {neighbour}")).unwrap();
    }
    let echo = UdpServer::start(&world.net, (cell.server(), 7), UdpService::Echo).unwrap();
    let address = (cell.server(), 7000);
    let stream = TcpServer::start(&world.net, address, TcpService::Streams).unwrap();
    let guest = stand.guest("tap0");
    let added = stand.ask("PUT", "/v1/vms/a", Some(json!({ "tap": "tap0" })));
    assert_eq!(added.0, 201, "{added:?}");
    let answers = || {
        let answer = guest.run(|| udp::probe(echo.address(), b"x", BRIEFLY));
        matches!(answer, Ok(UdpOutcome::Answered(_)))
    };
    // The reader of its stderr may be a moment behind.
    let says = |words: &str| {
        crate::eventually(words, || {
            stand.daemon.stderr().contains(words).then_some(())
        })
    };
    let displaced = || stand.ask("GET", "/v1/health", None).1["displaced"].clone();
    crate::eventually("the guest is served", || answers().then_some(()));
    assert_eq!(displaced(), json!([]));

    // A program that drops what is not the engine's, so everything.
    let theirs = stand.daemon.pins().path().join(
        (stand.daemon.pins().pins().into_iter())
            .find(|pin| pin.ends_with("engine_port"))
            .unwrap(),
    );
    // It is there until the last copy of a former link is closed: a child that another test forks has
    // one until its `exec`.
    let come = |device: &str| -> OwnedFd {
        crate::eventually("their program comes", || {
            match tcx::attach_in_front(&world.host, device, &theirs) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => None,
                link => Some(link.unwrap()),
            }
        })
    };
    let link = come(UPLINK);
    assert!(!answers());
    within_a_look("the uplink's place is taken back", || {
        answers().then_some(())
    });
    let behind = format!("{UPLINK}: slipgate's program runs behind the tcx program");
    says(&behind);
    crate::eventually("it is said", || (displaced() == json!([])).then_some(()));
    guest
        .run(|| tcp::download(stream.address(), 4 << 20, 1, WAIT))
        .unwrap();

    // Again at once: for fifteen seconds slipgate leaves it there, and says so.
    drop(link);
    let again = come(UPLINK);
    assert!(!answers());
    within_a_look("it is said", || {
        (displaced() == json!([UPLINK]) && !answers()).then_some(())
    });
    for command in ["doctor", "stats"] {
        let output = stand.daemon.run(&[command]).unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let said =
            text.contains(UPLINK) && text.contains("runs behind the tcx program engine_port");
        // What was said a moment ago may be over.
        assert!(said || displaced() == json!([]), "{text}");
    }
    within_a_look("taken back after a wait", || answers().then_some(()));
    drop(again);
    assert!(answers(), "who goes takes nothing along");

    // Of filters the kernel tells.
    let mut tc = std::process::Command::new("tc");
    tc.args("filter add dev tap0 ingress pref 1 bpf da pinned".split(' '));
    tc.arg(&theirs);
    world.host.output(tc).unwrap();
    crate::eventually("the TAP's place is taken back", || answers().then_some(()));
    says("runs behind the tc filter bpf with pref 1");
    // A qdisc that somebody removes takes slipgate's filters along. The kernel refuses it while anybody
    // reads them, as slipgate does to look at its places.
    crate::eventually("the qdisc is removed", || {
        let mut tc = std::process::Command::new("tc");
        tc.args("qdisc del dev tap0 clsact".split(' '));
        world.host.output(tc).ok()
    });
    crate::eventually("the guest is served", || answers().then_some(()));
}
