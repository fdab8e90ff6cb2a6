//! `slipgate attach` beside a daemon: it adds its VMs there, and they go with it.

use std::{
    net::TcpStream,
    os::unix::net::UnixListener,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Slipgate,
    clients::tcp::{self, EchoSession},
    servers::{TcpServer, TcpService},
    turns,
    world::UPLINK,
};

use crate::{
    BRIEFLY, Cell, WAIT,
    daemon::Stand,
    eventually,
    matrix::{at, matrix},
};

matrix! {
    a_vm_is_the_daemons_for_as_long_as_attach_runs: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    rules_of_attach_hold_for_its_vm_alone: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    attach_comes_back_to_a_daemon_that_starts_again: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    attach_ends_on_a_signal_while_a_daemon_takes_long_to_answer: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    attach_that_is_refused_leaves_anothers_vm_alone: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    attach_ends_when_its_vm_is_removed_by_another: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    what_a_daemon_can_not_do_for_one_vm_is_refused_and_own_processes_can_be_had: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
}

/// Time limit for an end by a signal: a quarter of that for a daemon's answer.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

impl Stand {
    /// `slipgate attach ARGS…` beside the daemon.
    fn attach(&self, args: &[&str]) -> Slipgate {
        Slipgate::attach(&self.world.host, self.daemon.pins(), args).unwrap()
    }

    fn attach_error(&self, args: &[&str]) -> String {
        let attached = Slipgate::attach(&self.world.host, self.daemon.pins(), args);
        attached.err().expect("it is refused").to_string()
    }

    /// The names of the VMs.
    fn names(&self) -> Vec<String> {
        let vms = self.vms().into_iter();
        vms.map(|vm| vm["name"].as_str().unwrap().to_owned())
            .collect()
    }
}

fn goes_on(stream: &mut TcpStream) -> bool {
    EchoSession::new(stream).round(1_000).is_ok()
}

fn a_vm_is_the_daemons_for_as_long_as_attach_runs(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let [first, second] = ["tap0", "tap1"].map(|tap| stand.guest(tap));
    stand.vm(&["add", "stays", "--tap", "tap1"]);
    let mut others = stand.connect(&second);
    let args = ["--tap", "tap0", "--uplink", UPLINK, "--max-flows", "7"];
    let _server = TcpServer::start(&first.ns, (cell.guest(), 80), TcpService::Echo).unwrap();
    for orderly in [true, false] {
        let mut attached = stand.attach(&[&args[..], &["--forward", "tcp:8080:80"]].concat());
        assert!(attached.ready_line().contains("tap0, by the daemon"));
        assert_eq!(attached.engine_pid(), None, "no process of its own");
        let vm = &stand.vms()[1];
        assert_eq!((&vm["name"], &vm["tied"]), (&"tap0".into(), &true.into()));
        assert_eq!(vm["quotas"]["max_flows"], 7);
        let mut stream = stand.connect(&first);
        stand.goes_on(&first, &mut stream);
        let forwarded = at(cell.host(), 8080);
        let from_world = stand.world.net.run(|| tcp::connect(forwarded, WAIT));
        assert!(goes_on(&mut from_world.unwrap()));
        match orderly {
            true => {
                assert!(attached.stop().unwrap().success());
                assert_eq!(stand.names(), ["stays"], "gone when the command has ended");
            }
            false => {
                attached.kill_broker().unwrap();
                eventually("the daemon notices", || {
                    (stand.names() == ["stays"]).then_some(())
                });
            }
        }
        assert!(
            first
                .run(|| EchoSession::new(&mut stream).round(10))
                .is_err()
        );
        stand.goes_on(&second, &mut others);
    }
}

fn rules_of_attach_hold_for_its_vm_alone(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let [first, second] = ["tap0", "tap1"].map(|tap| stand.guest(tap));
    stand.vm(&["add", "other", "--tap", "tap1"]);
    let mut attached = stand.attach(&["--tap", "tap0", "--default", "deny"]);
    first
        .run(|| tcp::expect_refused(stand.echo.address()))
        .unwrap();
    stand.connect(&second);
    assert!(attached.stop().unwrap().success());
    let allow = format!("{}/tcp", stand.echo.address());
    let rules = ["--tap", "tap0", "--default", "deny", "--allow", &allow];
    let mut attached = stand.attach(&rules);
    stand.connect(&first);
    assert!(attached.stop().unwrap().success());
}

fn attach_comes_back_to_a_daemon_that_starts_again(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let guest = stand.guest("tap0");
    let mut attached = stand.attach(&["--tap", "tap0"]);
    let mut stream = stand.connect(&guest);
    stand.vm(&["set", "tap0", "--max-flows", "5"]);
    stand.daemon.kill_both().unwrap();
    stand.goes_on(&guest, &mut stream);
    stand.daemon = stand.daemon.again().unwrap();
    stand.goes_on(&guest, &mut stream);
    eventually("it comes back", || {
        let said = attached.stderr();
        said.contains("served by another daemon").then_some(())
    });
    assert_eq!(stand.vms()[0]["state"], "served");
    // What was changed meanwhile is not undone.
    assert_eq!(stand.vms()[0]["quotas"]["max_flows"], 5);
    stand.goes_on(&guest, &mut stream);
    stand.connect(&guest);
    attached.kill_broker().unwrap();
    eventually("the VM goes", || stand.names().is_empty().then_some(()));
    // So it does while there is no daemon.
    assert!(stand.daemon.stop().unwrap().success());
    stand.daemon = stand.daemon.again().unwrap();
    assert_eq!(stand.names().len(), 0);
}

fn attach_ends_on_a_signal_while_a_daemon_takes_long_to_answer(cell: Cell) {
    let _turn = turns::alone("it compares an answer's time with a promise");
    let mut stand = Stand::of(cell, &[]);
    let _guest = stand.guest("tap0");
    let mut attached = stand.attach(&["--tap", "tap0"]);
    let socket = stand.daemon.run_dir().unwrap().join("daemon.sock");
    stand.daemon.kill_both().unwrap();
    std::fs::remove_file(&socket).unwrap();
    let silent = UnixListener::bind(&socket).unwrap();
    let asked = silent.accept().unwrap();
    let begun = Instant::now();
    assert!(attached.stop().unwrap().success());
    assert!(begun.elapsed() < ENDS_WITHIN, "{:?}", begun.elapsed());
    drop((asked, silent));
}

fn attach_that_is_refused_leaves_anothers_vm_alone(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let guest = stand.guest("tap0");
    let host = &stand.world.host;
    let taken = TcpServer::start(host, (cell.host(), 8080), TcpService::Echo).unwrap();
    let refused = ["--tap", "tap0", "--forward", "tcp:8080:80"];
    let error = stand.attach_error(&refused);
    assert!(error.contains("taken by"), "{error}");
    stand.vm(&["add", "tap0", "--tap", "tap0"]);
    let mut stream = stand.connect(&guest);
    stand.attach_error(&refused);
    drop(taken);
    std::thread::sleep(BRIEFLY);
    assert_eq!(stand.names(), ["tap0"]);
    stand.goes_on(&guest, &mut stream);
}

fn attach_ends_when_its_vm_is_removed_by_another(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let _guest = stand.guest("tap0");
    let attached = stand.attach(&["--tap", "tap0"]);
    stand.vm(&["set", "tap0", "--max-flows", "5"]);
    assert_eq!(stand.vms()[0]["tied"], true);
    stand.vm(&["rm", "tap0"]);
    eventually("it ends", || {
        let said = attached.stderr();
        said.contains("removed from the daemon by somebody else")
            .then_some(())
    });
}

fn what_a_daemon_can_not_do_for_one_vm_is_refused_and_own_processes_can_be_had(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let guest = stand.guest("tap0");
    stand.vm(&["add", "a", "--tap", "tap1"]);
    for (args, part) in [
        (
            &["--tap", "tap0", "--mtu", "1400"][..],
            "has that for all its VMs",
        ),
        (
            &["--tap", "tap0", "--policy", "f.toml"],
            "slipgate policy put",
        ),
        (&["--tap", "tap0", "--on-exit", "keep"], "slipgate vm add"),
        (
            &["--tap", "tap0", "--uplink", "absent0"],
            "there is no such device",
        ),
        (&["--tap", "tap0", "--uplink", "lo"], "leads nowhere"),
        (&["--vm", "name=a,tap=tap0"], "serves a VM a already"),
        (&["--vm", "name=b,tap=tap1"], "it is the TAP of a"),
    ] {
        let error = stand.attach_error(args);
        assert!(error.contains(part), "{args:?}: {error}");
    }
    assert_eq!(stand.names(), ["a"]);
    let own = [
        "--tap", "tap0", "--uplink", UPLINK, "--own", "--mtu", "1400",
    ];
    let mut own = stand.attach(&[&own, cell.flags()].concat());
    assert!(own.engine_pid().is_some());
    stand.connect(&guest);
    assert!(own.stop().unwrap().success());
}
