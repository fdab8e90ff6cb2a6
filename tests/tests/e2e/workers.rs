//! `slipgate serve --workers N`: engines that share out the VMs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::TcpStream,
};

use serde_json::Value;
use slipgate_testbed::{
    Guest,
    clients::{
        tcp,
        tcp::{ConnectOutcome, EchoSession},
    },
    require_root_and_tun,
    servers::{TcpServer, TcpService},
};

use crate::{Cell, WAIT, daemon::Stand, eventually, matrix::matrix};

matrix! {
    vms_are_shared_out_and_each_engine_admits_its_own: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "each VM has an engine of its own";
    while_one_engine_is_replaced_the_others_guests_notice_nothing: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "each VM has an engine of its own";
    a_policy_is_in_force_at_every_engine_when_the_command_ends: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "each VM has an engine of its own";
    all_flows_live_on_under_another_number_of_workers: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "each VM has an engine of its own";
}

/// A daemon with so many workers, and VMs `a`, `b`, … on `tap0`, `tap1`, …, each with a flow.
fn stand_of(cell: Cell, workers: &str, vms: usize) -> (Stand, Vec<Guest>, Vec<TcpStream>) {
    let stand = Stand::of(cell, &["--workers", workers]);
    let mut guests = Vec::new();
    for at in 0..vms {
        let tap = format!("tap{at}");
        guests.push(stand.guest(&tap));
        stand.vm(&["add", name_of(at), "--tap", &tap]);
    }
    let streams = guests.iter().map(|guest| stand.connect(guest)).collect();
    (stand, guests, streams)
}

fn name_of(at: usize) -> &'static str {
    ["a", "b", "c", "d"][at]
}

/// The worker of each VM.
fn workers_of(stand: &Stand) -> BTreeMap<String, u64> {
    let of = |vm: &Value| Some((vm["name"].as_str()?.to_owned(), vm["worker"].as_u64()?));
    stand.vms().iter().filter_map(of).collect()
}

fn all_go_on(stand: &Stand, guests: &[Guest], streams: &mut [TcpStream]) {
    for (guest, stream) in guests.iter().zip(streams) {
        stand.goes_on(guest, stream);
    }
}

/// How many flows each VM has.
fn flows_of(stand: &Stand) -> BTreeMap<String, usize> {
    let mut flows = BTreeMap::new();
    for flow in stand.daemon.flows().unwrap() {
        *flows.entry(flow.vm).or_default() += 1;
    }
    flows
}

fn engines(stand: &Stand) -> Vec<u32> {
    stand.daemon.children_named("slipgate-engine")
}

fn one_each(vms: usize) -> BTreeMap<String, usize> {
    (0..vms).map(|at| (name_of(at).to_owned(), 1)).collect()
}

fn vms_are_shared_out_and_each_engine_admits_its_own(cell: Cell) {
    let (stand, guests, mut streams) = stand_of(cell, "2", 4);
    assert_eq!(engines(&stand).len(), 2);
    let of: Vec<u64> = workers_of(&stand).into_values().collect();
    assert_eq!(of, [0, 1, 0, 1]);
    assert_eq!(flows_of(&stand), one_each(4));
    let stats = stand.daemon.stats().unwrap();
    assert_eq!(stats["vms"].as_array().unwrap().len(), 4, "{stats}");
    for at in 0..4 {
        let to = stand.echo.address().to_string();
        let (admitted, said) = stand.daemon.why(name_of(at), &to, "tcp").unwrap();
        assert!(admitted, "{said}");
    }

    // One that goes makes room at its worker for the next.
    stand.vm(&["rm", "a"]);
    stand.vm(&["add", "a", "--tap", "tap0"]);
    assert_eq!(workers_of(&stand)["a"], 0);
    streams[0] = stand.connect(&guests[0]);
    all_go_on(&stand, &guests, &mut streams);

    // Flows are known by their ids at whichever engine has them.
    for (at, guest) in guests.iter().enumerate() {
        let flows = stand.daemon.flows().unwrap();
        let flow = flows.into_iter().find(|flow| flow.vm == name_of(at));
        stand.daemon.run(&["cut", &flow.unwrap().id]).unwrap();
        let cut = guest.run(|| EchoSession::new(&mut streams[at]).round(10));
        assert!(cut.is_err(), "{}", name_of(at));
    }

    assert!(stand.daemon.run(&["stop"]).is_ok());
    eventually("it ends", || (!stand.daemon.broker_runs()).then_some(()));
    assert!(stand.daemon.pins().pins().is_empty());
    let links = stand.world.host.run(|| fs::read_to_string("/proc/net/dev"));
    assert!(!links.unwrap().contains("sgport"), "its ports are gone");
}

fn while_one_engine_is_replaced_the_others_guests_notice_nothing(cell: Cell) {
    let (stand, guests, mut streams) = stand_of(cell, "2", 2);
    let before = engines(&stand);
    // It is there and answers nothing, so that the moment lasts.
    slipgate_testbed::signal(before[0], libc::SIGSTOP);
    for _ in 0..3 {
        stand.connect(&guests[1]);
    }
    let (admitted, said) = {
        let to = stand.echo.address().to_string();
        stand.daemon.why("b", &to, "tcp").unwrap()
    };
    assert!(admitted, "{said}");
    slipgate_testbed::signal(before[0], libc::SIGKILL);
    stand.connect(&guests[1]);
    let after = eventually("another engine", || {
        let now = engines(&stand);
        (now.len() == 2 && !now.contains(&before[0])).then_some(now)
    });
    assert!(after.contains(&before[1]), "the other one is the same");
    stand.connect(&guests[0]);
    all_go_on(&stand, &guests, &mut streams);
}

fn a_policy_is_in_force_at_every_engine_when_the_command_ends(cell: Cell) {
    let (stand, guests, mut streams) = stand_of(cell, "2", 2);
    let second =
        TcpServer::start(&stand.world.net, (cell.server_2(), 7000), TcpService::Echo).unwrap();
    let file = stand.scratch.path().join("closed.toml");
    let put = |text: &str| {
        fs::write(&file, text).unwrap();
        let file = file.display().to_string();
        let said = stand.daemon.run(&["policy", "put", "closed", &file]);
        String::from_utf8(said.unwrap().stdout).unwrap()
    };
    put("default = \"allow\"\n");
    for vm in ["a", "b"] {
        stand.vm(&["set", vm, "--policy", "closed"]);
    }
    all_go_on(&stand, &guests, &mut streams);
    let kept = cell.server_2();
    let said = put(&format!(
        "default = \"deny\"\nrules = [{{ allow = \"{kept}\" }}]\n"
    ));
    assert_eq!(
        said,
        "closed is in force, generation 2: 2 flows cut, 0 go on\n"
    );
    for (guest, stream) in guests.iter().zip(&mut streams) {
        assert!(guest.run(|| EchoSession::new(stream).round(10)).is_err());
        let kept = guest.run(|| tcp::connect(second.address(), WAIT));
        kept.unwrap();
        let refused = guest.run(|| tcp::connect_outcome(stand.echo.address(), WAIT));
        let is_connected = matches!(refused, Ok(ConnectOutcome::Connected(_)));
        assert!(!is_connected);
    }
}

/// Whichever number of workers comes next, each flow has an engine again.
fn all_flows_live_on_under_another_number_of_workers(cell: Cell) {
    let (mut stand, guests, mut streams) = stand_of(cell, "3", 4);
    let ids = |stand: &Stand| -> BTreeSet<String> {
        let flows = stand.daemon.flows().unwrap();
        flows.into_iter().map(|flow| flow.id).collect()
    };
    let first = ids(&stand);
    assert_eq!(first.len(), 4);
    for workers in ["2", "1", "3"] {
        match workers {
            "1" => stand.daemon.kill_both().unwrap(),
            _ => assert!(stand.daemon.stop().unwrap().success()),
        }
        all_go_on(&stand, &guests, &mut streams);
        stand.daemon = stand.daemon.again_with(&["--workers", workers]).unwrap();
        assert_eq!(engines(&stand).len().to_string(), workers);
        let now = ids(&stand);
        assert!(first.is_subset(&now), "--workers {workers}: {now:?}");
        all_go_on(&stand, &guests, &mut streams);
        for guest in &guests {
            stand.connect(guest);
        }
    }
    // The same from one that serves.
    let flags = ["--workers", "2", "--take-over"];
    stand.daemon = stand.daemon.again_with(&flags).unwrap();
    assert!(first.is_subset(&ids(&stand)));
    all_go_on(&stand, &guests, &mut streams);
    // The workers that came last have none, and get what comes.
    stand.vm(&["add", "new", "--tap", "tap9"]);
    let of = workers_of(&stand);
    assert_eq!((of["a"], of["b"], of["new"]), (0, 0, 1));
}

#[test]
fn a_number_of_workers_that_can_not_be_is_refused() {
    require_root_and_tun!();
    let stand = Stand::new(&[]);
    for (args, part) in [
        (&["serve", "--workers", "0"][..], "without an engine"),
        (&["serve", "--workers", "65"], "has room for 64 engines"),
        (
            &["serve", "--workers", "2", "--pcap", "/nonexistent/pcap"],
            "--pcap writes the frames of one engine",
        ),
    ] {
        let error = stand.daemon.run(args).unwrap_err().to_string();
        assert!(error.contains(part), "{args:?}: {error}");
    }
}
