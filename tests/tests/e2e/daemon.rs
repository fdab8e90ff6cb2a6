//! `slipgate serve`: VMs that come, change and go while others talk.

use std::{
    fs,
    net::{IpAddr, TcpStream},
};

use serde_json::Value;
use slipgate_testbed::{
    Guest, PinDir, Slipgate, World,
    clients::{
        tcp,
        tcp::{ConnectOutcome, EchoSession},
    },
    flow_log,
    servers::{TcpServer, TcpService},
    world::UPLINK,
};

use crate::{
    BRIEFLY, Cell, WAIT, eventually,
    matrix::{cells, matrix, pings},
};

matrix! {
    vms_come_and_go_while_others_talk: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    a_vm_waits_for_its_tap: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    a_vm_is_changed_while_it_is_served: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    labels_are_in_records_and_in_flows_and_where_told_in_metrics: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    a_vms_other_policy_holds_when_the_command_ends: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    a_policy_that_is_put_cuts_what_it_refuses_and_outlives_the_daemon: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    a_daemons_vms_outlive_it: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    a_daemon_that_is_told_to_stop_leaves_nothing_unless_it_is_to_be_kept: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    vms_come_and_go_while_there_is_no_engine: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    what_can_not_be_served_is_refused_with_the_reason: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
}

/// A daemon and an echo server; fields go in order.
pub(crate) struct Stand {
    pub(crate) daemon: Slipgate,
    pub(crate) echo: TcpServer<IpAddr>,
    pub(crate) world: World,
    pub(crate) scratch: tempfile::TempDir,
    pub(crate) cell: Cell,
}

impl Stand {
    pub(crate) fn new(args: &[&str]) -> Self {
        Self::of(cells::hybrid_ipv4, args)
    }

    /// The stand of a cell of hybrid mode. Its guests have their addresses at once.
    pub(crate) fn of(cell: Cell, args: &[&str]) -> Self {
        let world = World::new().unwrap();
        let scratch = tempfile::tempdir().unwrap();
        let log = scratch.path().join("flows.jsonl").display().to_string();
        let pins = PinDir::new().unwrap();
        let mut all = vec!["--uplink", UPLINK, "--flow-log", &log];
        all.extend(cell.give(&world));
        all.extend(args);
        let daemon = Slipgate::serve(&world.host, &pins, &all).unwrap();
        let echo = TcpServer::start(&world.net, (cell.server(), 7000), TcpService::Echo).unwrap();
        Self {
            daemon,
            echo,
            world,
            scratch,
            cell,
        }
    }

    pub(crate) fn guest(&self, tap: &str) -> Guest {
        self.cell.guest_at(&self.world, tap)
    }

    /// Returns the output of `slipgate vm ARGS…`.
    pub(crate) fn vm(&self, args: &[&str]) -> String {
        let all: Vec<&str> = ["vm"].into_iter().chain(args.iter().copied()).collect();
        String::from_utf8(self.daemon.run(&all).unwrap().stdout).unwrap()
    }

    pub(crate) fn vm_error(&self, args: &[&str]) -> String {
        let all: Vec<&str> = ["vm"].into_iter().chain(args.iter().copied()).collect();
        self.daemon.run(&all).unwrap_err().to_string()
    }

    /// The VMs as `slipgate vm ls --json` has them.
    pub(crate) fn vms(&self) -> Vec<Value> {
        serde_json::from_str(&self.vm(&["ls", "--json"])).unwrap()
    }

    pub(crate) fn connect(&self, guest: &Guest) -> TcpStream {
        guest
            .run(|| tcp::connect(self.echo.address(), WAIT))
            .unwrap()
    }

    pub(crate) fn goes_on(&self, guest: &Guest, stream: &mut TcpStream) {
        guest.run(|| EchoSession::new(stream).round(1_000)).unwrap();
    }

    fn reaches(&self, guest: &Guest) -> bool {
        pings(guest, self.cell.server(), BRIEFLY)
    }

    /// A second server that echoes.
    fn second_echo(&self) -> TcpServer<IpAddr> {
        let address = (self.cell.server_2(), 7000);
        TcpServer::start(&self.world.net, address, TcpService::Echo).unwrap()
    }

    /// Ends of flows in the flow log, by VM.
    pub(crate) fn ends(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        self.records("flow_end")
            .iter()
            .map(|end| (text(&end["vm"]), text(&end["end"])))
            .collect()
    }

    /// Records of this event in the flow log.
    fn records(&self, event: &str) -> Vec<Value> {
        let log = self.scratch.path().join("flows.jsonl");
        let mut records = flow_log::records(&log).unwrap();
        records.retain(|record| record["event"] == event);
        records
    }
}

fn vms_come_and_go_while_others_talk(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    assert!(stand.daemon.ready_line().contains("no VM yet"));
    let [first, second] = ["tap0", "tap1"].map(|tap| stand.guest(tap));
    // Nothing passes before the VM is known.
    assert!(!stand.reaches(&first));
    assert_eq!(
        stand.vm(&["add", "a", "--tap", "tap0"]),
        "a added: served on tap0\n"
    );
    let mut stream = stand.connect(&first);
    stand.goes_on(&first, &mut stream);

    assert_eq!(
        stand.vm(&["add", "b", "--tap", "tap1"]),
        "b added: served on tap1\n"
    );
    let mut other = stand.connect(&second);
    assert_eq!(
        stand.vm(&["add", "a", "--tap", "tap0"]),
        "a as it was: served on tap0\n"
    );
    stand.goes_on(&first, &mut stream);

    assert_eq!(stand.vm(&["rm", "b"]), "b removed\n");
    let other_vm = |(vm, end): &(String, String)| vm == "b" && end == "vm-removed";
    eventually("its flow's record", || {
        stand.ends().iter().any(other_vm).then_some(())
    });
    assert!(!stand.reaches(&second));
    assert!(
        second
            .run(|| EchoSession::new(&mut other).round(10))
            .is_err()
    );
    stand.goes_on(&first, &mut stream);
    let names: Vec<Value> = stand
        .vms()
        .into_iter()
        .map(|mut vm| vm["name"].take())
        .collect();
    assert_eq!(names, ["a"]);

    // Its name and its TAP are free, and it is another VM.
    let id = stand.vms()[0]["id"].as_u64().unwrap();
    stand.vm(&["add", "b", "--tap", "tap1"]);
    assert!(stand.vms()[1]["id"].as_u64().unwrap() > id + 1);
    stand.connect(&second);
}

fn a_vm_waits_for_its_tap(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    assert_eq!(
        stand.vm(&["add", "a", "--tap", "tap0"]),
        "a added: waiting on tap0\n"
    );
    let guest = stand.guest("tap0");
    eventually("it is served", || {
        (stand.vms()[0]["state"] == "served").then_some(())
    });
    let mut stream = stand.connect(&guest);
    stand.goes_on(&guest, &mut stream);
    drop(guest);
    eventually("it waits again", || {
        (stand.vms()[0]["state"] == "waiting").then_some(())
    });
}

fn a_vm_is_changed_while_it_is_served(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let guest = stand.guest("tap0");
    stand.vm(&["add", "a", "--tap", "tap0", "--label", "tenant=x"]);
    let mut stream = stand.connect(&guest);
    assert_eq!(
        stand.vm(&["set", "a", "--max-flows", "1"]),
        "a changed: served on tap0\n"
    );
    let refused = guest
        .run(|| tcp::connect_outcome(stand.echo.address(), WAIT))
        .unwrap();
    assert!(matches!(refused, ConnectOutcome::Refused(_)), "{refused:?}");
    stand.goes_on(&guest, &mut stream);
    let vm = stand.vms().remove(0);
    assert_eq!(vm["labels"]["tenant"], "x");
    assert_eq!(vm["quotas"]["max_flows"], 1);
    let error = stand.vm_error(&["set", "a", "--ip", "10.0.2.77"]);
    assert!(error.contains("remove it and add it again"), "{error}");

    // Another TAP, behind which the same guest is: its flow goes on.
    stand.vm(&["set", "a", "--max-flows", "100", "--tap", "tap9"]);
    assert_eq!(stand.vms()[0]["state"], "waiting");
    assert!(!stand.reaches(&guest));
    stand.vm(&["set", "a", "--tap", "tap0"]);
    stand.goes_on(&guest, &mut stream);
}

fn labels_are_in_records_and_in_flows_and_where_told_in_metrics(cell: Cell) {
    let metrics = ["--metrics", "127.0.0.1:9600", "--metrics-label", "tenant"];
    let stand = Stand::of(cell, &metrics);
    let guest = stand.guest("tap0");
    let labels = ["--label", "tenant=x", "--label", "example.com/run=7"];
    stand.vm(&[&["add", "a", "--tap", "tap0"][..], &labels].concat());
    let stream = stand.connect(&guest);
    let expected = serde_json::json!({ "tenant": "x", "example.com/run": "7" });
    let flows = || -> Value {
        let flows = stand.daemon.run(&["flows", "--json"]).unwrap().stdout;
        serde_json::from_slice(&flows).unwrap()
    };
    assert_eq!(flows()[0]["labels"], expected);
    let page = || {
        let args = ["--silent", "http://127.0.0.1:9600/metrics"];
        let mut curl = std::process::Command::new("curl");
        let output = stand.world.host.run(|| curl.args(args).output().unwrap());
        String::from_utf8(output.stdout).unwrap()
    };
    let page = page();
    let info = "slipgate_vm_info{vm=\"a\",label_tenant=\"x\"} 1";
    assert!(page.contains(info) && !page.contains("run"), "{page}");

    // A flow has the labels that its VM has.
    stand.vm(&["set", "a", "--label", "tenant=y"]);
    assert_eq!(flows()[0]["labels"]["tenant"], "y");
    drop(stream);
    stand.vm(&["rm", "a"]);
    let line = eventually("the flow's record", || {
        stand.records("flow_end").into_iter().next()
    });
    assert_eq!(line["labels"]["tenant"], "y", "{line}");
    for bad in ["x-=1", "a b=1", "a=b c", "a/b/c=1", "=1"] {
        let error = stand.vm_error(&["add", "a", "--tap", "tap0", "--label", bad]);
        assert!(
            error.contains("label") || error.contains("KEY=VALUE"),
            "{bad}: {error}"
        );
    }
}

fn a_vms_other_policy_holds_when_the_command_ends(cell: Cell) {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("policy.toml");
    let text = format!(
        "default = \"allow\"\n[policy.closed]\ndefault = \"deny\"\n\
         [[policy.closed.rules]]\nallow = \"{}\"\n",
        cell.server_2()
    );
    fs::write(&file, text).unwrap();
    let stand = Stand::of(cell, &["--policy", &file.display().to_string()]);
    let second = stand.second_echo();
    let [guest, other] = ["tap0", "tap1"].map(|tap| stand.guest(tap));
    stand.vm(&["add", "a", "--tap", "tap0"]);
    stand.vm(&["add", "b", "--tap", "tap1"]);
    let mut stream = stand.connect(&guest);
    let mut kept = guest.run(|| tcp::connect(second.address(), WAIT)).unwrap();
    let mut others = stand.connect(&other);

    assert_eq!(
        stand.vm(&["set", "a", "--policy", "closed"]),
        "a changed: served on tap0\n"
    );
    assert!(
        guest
            .run(|| EchoSession::new(&mut stream).round(10))
            .is_err()
    );
    stand.goes_on(&guest, &mut kept);
    stand.goes_on(&other, &mut others);
    let error = stand.vm_error(&["set", "a", "--policy", "none-such"]);
    assert!(error.contains("none-such"), "{error}");
    assert_eq!(stand.vms()[0]["policy"], "closed");
    // So is one that is added with it.
    stand.vm(&["rm", "b"]);
    stand.vm(&["add", "b", "--tap", "tap1", "--policy", "closed"]);
    let refused = other
        .run(|| tcp::connect_outcome(stand.echo.address(), WAIT))
        .unwrap();
    assert!(
        !matches!(refused, ConnectOutcome::Connected(_)),
        "{refused:?}"
    );
}

fn a_policy_that_is_put_cuts_what_it_refuses_and_outlives_the_daemon(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let second = stand.second_echo();
    let [guest, other] = ["tap0", "tap1"].map(|tap| stand.guest(tap));
    let put = |stand: &Stand, text: &str| {
        let file = stand.scratch.path().join("closed.toml");
        fs::write(&file, text).unwrap();
        stand
            .daemon
            .run(&["policy", "put", "closed", &file.display().to_string()])
    };
    put(&stand, "default = \"allow\"\n").unwrap();
    stand.vm(&["add", "a", "--tap", "tap0", "--policy", "closed"]);
    stand.vm(&["add", "b", "--tap", "tap1"]);
    let mut stream = stand.connect(&guest);
    let mut kept = guest.run(|| tcp::connect(second.address(), WAIT)).unwrap();
    let mut others = stand.connect(&other);
    let allowed = cell.server_2();
    let closed = format!("default = \"deny\"\nrules = [{{ allow = \"{allowed}\" }}]\n");
    let said = put(&stand, &closed).unwrap().stdout;
    let said = String::from_utf8(said).unwrap();
    assert_eq!(
        said, "closed is in force, generation 2: 1 flow cut, 1 go on\n",
        "of the policy's VM; the other's is not looked at"
    );
    assert!(
        guest
            .run(|| EchoSession::new(&mut stream).round(10))
            .is_err()
    );
    stand.goes_on(&guest, &mut kept);
    stand.goes_on(&other, &mut others);
    for (text, part) in [
        ("default = \"maybe\"\n", "closed:1"),
        ("colour = 1\n", "colour"),
    ] {
        let error = put(&stand, text).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    stand.daemon.kill_both().unwrap();
    stand.daemon = stand.daemon.again().unwrap();
    stand.goes_on(&guest, &mut kept);
    let refused = guest
        .run(|| tcp::connect_outcome(stand.echo.address(), WAIT))
        .unwrap();
    assert!(
        !matches!(refused, ConnectOutcome::Connected(_)),
        "{refused:?}"
    );
    stand.connect(&other);
}

fn a_daemons_vms_outlive_it(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let guest = stand.guest("tap0");
    stand.vm(&["add", "a", "--tap", "tap0", "--mac", "52:54:00:12:34:56"]);
    stand.vm(&["add", "b", "--tap", "tap1"]);
    stand.vm(&["rm", "b"]);
    let mut stream = stand.connect(&guest);
    let before = stand.vms();
    // Killed, then stopped as a service manager does.
    stand.daemon.kill_both().unwrap();
    stand.goes_on(&guest, &mut stream);
    stand.daemon = stand.daemon.again().unwrap();
    assert_eq!(stand.vms(), before);
    stand.goes_on(&guest, &mut stream);
    assert!(stand.daemon.stop().unwrap().success());
    stand.goes_on(&guest, &mut stream);
    stand.daemon = stand.daemon.again().unwrap();
    assert_eq!(stand.vms(), before);
    stand.goes_on(&guest, &mut stream);
    stand.connect(&guest);
}

fn a_daemon_that_is_told_to_stop_leaves_nothing_unless_it_is_to_be_kept(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let guest = stand.guest("tap0");
    stand.vm(&["add", "a", "--tap", "tap0"]);
    let mut stream = stand.connect(&guest);
    let ended = |stand: &Stand| {
        eventually("it ends", || (!stand.daemon.broker_runs()).then_some(()));
    };
    stand.daemon.run(&["stop", "--keep"]).unwrap();
    ended(&stand);
    stand.goes_on(&guest, &mut stream);
    stand.daemon = stand.daemon.again().unwrap();
    assert_eq!(stand.vms().len(), 1);
    stand.daemon.run(&["stop"]).unwrap();
    ended(&stand);
    assert!(stand.daemon.pins().pins().is_empty());
    let error = stand.daemon.run(&["stop"]).unwrap_err().to_string();
    assert!(error.contains("no daemon serves"), "{error}");
}

fn vms_come_and_go_while_there_is_no_engine(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let [first, second] = ["tap0", "tap1"].map(|tap| stand.guest(tap));
    stand.vm(&["add", "a", "--tap", "tap0"]);
    let mut stream = stand.connect(&first);
    // Oftener than the engine of `attach` may end.
    for round in 0..4 {
        stand.daemon.kill_engine().unwrap();
        stand.vm(&["add", "b", "--tap", "tap1"]);
        let mut others = stand.connect(&second);
        stand.goes_on(&second, &mut others);
        stand.daemon.kill_engine().unwrap();
        stand.vm(&["rm", "b"]);
        assert_eq!(stand.vms().len(), 1, "round {round}");
        stand.goes_on(&first, &mut stream);
    }
}

fn what_can_not_be_served_is_refused_with_the_reason(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    stand.vm(&["add", "a", "--tap", "tap0"]);
    for (args, part) in [
        (&["add", "b", "--tap", "tap0"][..], "it is the TAP of a"),
        (&["add", "b", "--tap", UPLINK], "it is the uplink"),
        (&["add", "b", "--tap", "lo"], "not a TAP"),
        (&["add", "b/c", "--tap", "tap1"], "can't be a name"),
        (
            &["add", "b", "--tap", "tap1", "--mac", "nonsense"],
            "mac nonsense",
        ),
        (
            &["add", "b", "--tap", "tap1", "--ip", "192.0.2.1"],
            "ip 192.0.2.1",
        ),
        (&["add", "b", "--tap", "tap1", "--policy", "p"], "p"),
        (&["rm", "b"], "there is a"),
        (&["set", "b", "--max-flows", "2"], "there is a"),
    ] {
        let error = stand.vm_error(args);
        assert!(error.contains(part), "{args:?}: {error}");
    }
    assert_eq!(stand.vms().len(), 1);
    let error = Slipgate::serve(
        &stand.world.host,
        stand.daemon.pins(),
        &["--uplink", UPLINK],
    );
    let error = error.err().expect("there is a daemon").to_string();
    assert!(error.contains("another `slipgate serve`"), "{error}");
    let attached = Slipgate::attach(
        &stand.world.host,
        &PinDir::new().unwrap(),
        &["--uplink", UPLINK, "--tap", "tap0"],
    );
    assert!(attached.is_err(), "a second set of pins");
}
