//! `--max-vms` and `--max-rules` of `slipgate serve`: requests beyond them are refused with the
//! reason and change nothing, and how full they are is shown.

use std::net::{IpAddr, TcpStream};

use serde_json::{Value, json};
use slipgate_testbed::{
    Guest,
    clients::{
        tcp,
        tcp::{ConnectOutcome, EchoSession},
    },
    servers::{TcpServer, TcpService},
};

use crate::{Cell, WAIT, api::Stand, eventually, matrix::matrix};

matrix! {
    a_vm_beyond_the_limit_is_refused_and_its_place_comes_back: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    a_policy_beyond_the_room_for_rules_is_refused_and_the_former_one_holds: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
}

fn detail(problem: &Value) -> &str {
    problem["detail"].as_str().unwrap_or_default()
}

fn assert_says(problem: &Value, parts: &[&str]) {
    for part in parts {
        assert!(detail(problem).contains(part), "{part}: {problem}");
    }
}

/// A value of the metrics, by the name with its labels.
fn metric(stand: &Stand, name: &str) -> String {
    let text = stand.metrics();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let value = line.unwrap_or_else(|| panic!("{name}: {text}"));
    value.trim().to_owned()
}

fn a_vm_beyond_the_limit_is_refused_and_its_place_comes_back(cell: Cell) {
    let stand = Stand::of(cell, &["--max-vms", "3", "--mtu", "1300"]);
    let guest = stand.guest("tap0");
    let host = &stand.world().host;
    // A TAP in use by others, which is not slipgate's to change until its VM is accepted.
    host.ip("tuntap add tap3 mode tap").unwrap();
    host.ip("link set tap3 up mtu 1400").unwrap();
    let [address, route, routes] = match cell.is_ipv6() {
        false => ["10.9.9.1/24", "10.8.0.0/16 via 10.9.9.2", "route"],
        true => ["fd09::1/64 nodad", "fd08::/64 via fd09::2", "-6 route"],
    };
    host.ip(&format!("address add {address} dev tap3")).unwrap();
    host.ip(&format!("{routes} add {route} dev tap3")).unwrap();
    let routes = format!("{routes} show dev tap3");
    let tap3 = || ["-o link show tap3", &routes].map(|shown| host.ip(shown).unwrap());
    let before = tap3();
    let address = (cell.server(), 7000);
    let echo = TcpServer::start(&stand.world().net, address, TcpService::Echo).unwrap();
    let put = |name: &str, tap: &str| {
        let body = match name {
            "d" => json!({ "tap": tap, "forwards": ["tcp:8080:80"] }),
            _ => json!({ "tap": tap }),
        };
        stand.ask("PUT", &format!("/v1/vms/{name}"), Some(body))
    };
    for (name, tap) in [("a", "tap0"), ("b", "tap1"), ("c", "tap2")] {
        let (status, vm) = put(name, tap);
        assert_eq!(status, 201, "{vm}");
    }
    let mut stream = guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    let mut goes_on = || guest.run(|| EchoSession::new(&mut stream).round(1_000));
    goes_on().unwrap();

    let (status, problem) = put("d", "tap3");
    assert_eq!(status, 422, "{problem}");
    assert_says(&problem, &["another VM", "room for 3", "--max-vms"]);
    let error = stand.daemon.run(&["vm", "add", "e", "--tap", "tap4"]);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("--max-vms"), "{error}");
    assert_eq!(tap3(), before);

    // Nothing of it is left, and what there is, is as it was and can be changed.
    assert_eq!(stand.ask("GET", "/v1/vms/d", None).0, 404);
    for forwards in [json!(["tcp:8080:80"]), json!([])] {
        let patch = json!({ "forwards": forwards });
        assert_eq!(stand.ask("PATCH", "/v1/vms/a", Some(patch)).0, 200);
    }
    goes_on().unwrap();
    let health = stand.ask("GET", "/v1/health", None).1;
    assert_eq!(json!([health["vms"], health["max_vms"]]), json!([3, 3]));
    let list = stand.daemon.run(&["vm", "ls"]).unwrap().stdout;
    let list = String::from_utf8(list).unwrap();
    assert!(list.contains("\n3 of 3 VMs; "), "{list}");
    assert_eq!(metric(&stand, "slipgate_limit{of=\"vms\"}"), "3");
    assert_eq!(metric(&stand, "slipgate_limit_used{of=\"vms\"}"), "3");

    assert_eq!(stand.ask("DELETE", "/v1/vms/b", None).0, 204);
    let (status, vm) = put("d", "tap3");
    assert_eq!(status, 201, "{vm}");
    goes_on().unwrap();
}

fn reaches(guest: &Guest, server: &TcpServer<IpAddr>) -> bool {
    guest
        .run(|| tcp::connect_outcome(server.address(), WAIT))
        .is_ok_and(|outcome| matches!(outcome, ConnectOutcome::Connected(_)))
}

fn a_policy_beyond_the_room_for_rules_is_refused_and_the_former_one_holds(cell: Cell) {
    let mut stand = Stand::of(cell, &["--max-rules", "16"]);
    let servers = [7000, 7001].map(|port| {
        let address = (cell.server(), port);
        TcpServer::start(&stand.world().net, address, TcpService::Echo).unwrap()
    });
    let port = |port: u16| cell.destination(cell.server(), &format!("{port}/tcp"));
    // Of a server that is not there.
    let rule = |at: usize| match cell.is_ipv6() {
        false => format!("192.0.2.{at}:443/tcp"),
        true => format!("[2001:db8:9::{at}]:443/tcp"),
    };
    let guest = stand.guest("tap0");
    let path = "/v1/policies/one-port";
    let only = |port: String| format!("default = \"deny\"\nrules = [{{ allow = \"{port}\" }}]\n");
    assert_eq!(stand.put_policy(path, &only(port(7000))), 200);
    let body = json!({ "tap": "tap0", "policy": "one-port" });
    assert_eq!(stand.ask("PUT", "/v1/vms/a", Some(body)).0, 201);
    let mut stream = guest
        .run(|| tcp::connect(servers[0].address(), WAIT))
        .unwrap();
    let goes_on = |stream: &mut TcpStream| {
        guest.run(|| EchoSession::new(stream).round(1_000)).unwrap();
    };
    let before = stand.ask("GET", path, None).1;
    let rules_before = stand.ask("GET", "/v1/health", None).1["rules"].clone();

    // It denies what the stream needs, so it would be cut.
    let rules: Vec<String> = (1..=20)
        .map(|at| format!("{{ allow = \"{}\" }}", rule(at)))
        .collect();
    let more = format!("default = \"deny\"\nrules = [{}]\n", rules.join(", "));
    let (status, problem) = stand.put_text(path, &more);
    assert_eq!(status, 422, "{problem}");
    assert_says(
        &problem,
        &["no room for 23 rules", "share 16", "--max-rules"],
    );
    let rule = |at: usize| json!({ "allow": rule(at) });
    let policy = json!({ "default": "deny", "rules": (1..=20).map(rule).collect::<Value>() });
    let inline = json!({ "tap": "tap1", "policy": policy });
    let (status, problem) = stand.ask("PUT", "/v1/vms/b", Some(inline));
    assert_eq!(status, 422, "{problem}");
    assert_says(&problem, &["--max-rules"]);

    let mut is_as_before = |stand: &Stand| {
        assert_eq!(stand.ask("GET", path, None).1, before);
        assert_eq!(stand.ask("GET", "/v1/vms/b", None).0, 404);
        let health = stand.ask("GET", "/v1/health", None).1;
        let shown = json!([health["rules"], health["max_rules"]]);
        assert_eq!(shown, json!([rules_before, 16]));
        assert_eq!(metric(stand, "slipgate_limit{of=\"rules\"}"), "16");
        goes_on(&mut stream);
        assert_eq!(
            [&servers[0], &servers[1]].map(|it| reaches(&guest, it)),
            [true, false]
        );
    };
    is_as_before(&stand);
    stand.daemon.kill_both().unwrap();
    stand.daemon = stand.daemon.again().unwrap();
    let answers = || (stand.ask("GET", path, None).0 == 200).then_some(());
    eventually("the API answers", answers);
    is_as_before(&stand);

    // What fits is put in force as ever.
    assert_eq!(stand.put_policy(path, &only(port(7001))), 200);
    let reached = [&servers[0], &servers[1]].map(|it| reaches(&guest, it));
    assert_eq!(reached, [false, true]);
}
