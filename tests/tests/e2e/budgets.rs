//! Budgets of bytes: what is left, what happens at the end, and what a restart forgets of it.

use std::{
    fs::{self, Permissions},
    net::IpAddr,
    os::unix::fs::PermissionsExt as _,
    time::Duration,
};

use serde_json::{Value, json};
use slipgate_testbed::{
    clients::tcp::{self, ConnectOutcome},
    servers::{TcpServer, TcpService},
};

use crate::{
    Cell, Stand, WAIT,
    api::{self, Events},
    eventually,
    matrix::matrix,
    observability::{METRICS, scrape},
};

matrix! {
    a_spent_budget_cuts_and_refuses_until_there_is_more: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_spent_budget_refuses_and_lets_flows_go_on: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_spent_budget_freezes_until_there_is_more: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_spent_budget_is_told_once_to_who_reads_events: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "events are a daemon's (api.md)";
}

const BUDGET: u64 = 200_000;
/// Most that one frame counts for, L3 bytes: each segment that it is cut into, by 1,400 bytes at least,
/// has headers of its own.
const FRAME: u64 = 65_535 + 65_535 / 1_400 * (40 + 60);

fn policy(tx_bytes: u64, end: &str) -> String {
    format!("default = \"allow\"\n[quotas]\ntx_bytes = {tx_bytes}\nbytes_end = \"{end}\"\n")
}

/// A guest with the budget, and the policy's file.
fn stand(cell: Cell, end: &str) -> (Stand, tempfile::TempPath) {
    let file = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    fs::write(&file, policy(BUDGET, end)).unwrap();
    // As a user without privileges, too.
    fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
    let metrics = METRICS.to_string();
    let args = ["--policy", file.to_str().unwrap(), "--metrics", &metrics];
    (Stand::of(cell, &args), file)
}

fn serve(stand: &Stand) -> TcpServer<IpAddr> {
    let address = (stand.cell.server(), 80);
    TcpServer::start(&stand.world.net, address, TcpService::Streams).unwrap()
}

fn of_vm(stand: &Stand) -> Value {
    stand.slipgate.stats().unwrap()["vms"][0].take()
}

fn used(stand: &Stand) -> u64 {
    of_vm(stand)["limits"]["tx"]["used"].as_u64().unwrap()
}

/// Waits until the metrics have this budget, and as much left of it as `left` says. A page may be a
/// second old.
fn metrics_say(stand: &Stand, budget: u64, left: impl Fn(f64) -> bool) {
    eventually("the metrics of the budget", || {
        let all = scrape(stand);
        let of_vm =
            |name: &str| all.get(&format!("slipgate_{name}{{vm=\"tap0\",direction=\"tx\"}}"));
        let is_known = of_vm("budget_bytes") == Some(&(budget as f64));
        (is_known && left(*of_vm("budget_left_bytes")?)).then_some(())
    });
}

fn connects(stand: &Stand, server: &TcpServer<IpAddr>) -> bool {
    let outcome = stand
        .run(|| tcp::connect_outcome(server.address(), WAIT))
        .unwrap();
    matches!(outcome, ConnectOutcome::Connected(_))
}

fn apply(stand: &Stand, file: &tempfile::TempPath, text: &str) {
    fs::write(file, text).unwrap();
    let applied = stand.slipgate.run(&["policy", "apply"]).unwrap();
    assert!(applied.status.success(), "{applied:?}");
}

fn a_spent_budget_cuts_and_refuses_until_there_is_more(cell: Cell) {
    let (mut stand, file) = stand(cell, "cut");
    let server = serve(&stand);
    metrics_say(&stand, BUDGET, |left| left > BUDGET as f64 / 2.0);
    let sent = stand.run(|| tcp::upload(server.address(), 2_000_000, 1, WAIT));
    assert!(sent.is_err(), "{sent:?}");
    stand.says("has spent its budget of 200000 bytes (tx)");
    assert!(
        (BUDGET..BUDGET + FRAME).contains(&used(&stand)),
        "{}",
        used(&stand)
    );
    assert_eq!(of_vm(&stand)["limits"]["tx"]["left"], 0);
    metrics_say(&stand, BUDGET, |left| left == 0.0);
    assert!(stand.dropped("byte_budget") > 0);
    // The flow was cut, and not left to its time-out.
    eventually("the end of the flow", || {
        stand.flows_to(server.address()).is_empty().then_some(())
    });
    assert!(!connects(&stand, &server));
    assert!(stand.refused("byte_budget") > 0);
    let (admitted, why) = stand
        .slipgate
        .why("tap0", &server.address().to_string(), "tcp")
        .unwrap();
    assert!(!admitted && why.contains("budget"), "{why}");

    // Neither an engine's end nor all of slipgate's forgets it, but in user mode the tables end with it.
    if cell.is_hybrid() {
        let before = used(&stand);
        stand.slipgate.kill_both().unwrap();
        stand.again();
        assert_eq!(used(&stand), before);
        assert!(!connects(&stand, &server));
    }

    apply(&stand, &file, &policy(10_000_000, "cut"));
    metrics_say(&stand, 10_000_000, |left| left > 9e6);
    assert!(connects(&stand, &server));
    let sent = stand.run(|| tcp::upload(server.address(), 2_000_000, 1, WAIT));
    assert!(sent.is_ok(), "{sent:?}");
}

fn a_spent_budget_refuses_and_lets_flows_go_on(cell: Cell) {
    let (stand, _file) = stand(cell, "refuse");
    let server = serve(&stand);
    let sent = stand.run(|| tcp::upload(server.address(), 2_000_000, 1, Duration::from_secs(10)));
    assert!(sent.is_ok(), "{sent:?}");
    assert!(used(&stand) > 2_000_000);
    assert!(!connects(&stand, &server));
    assert_eq!(stand.dropped("byte_budget"), 0);
}

fn a_spent_budget_freezes_until_there_is_more(cell: Cell) {
    let (stand, file) = stand(cell, "freeze");
    let server = serve(&stand);
    let frozen = |wanted: bool| {
        eventually("the freeze or the thaw", || {
            // Absent where it is not.
            let is = of_vm(&stand)["frozen"].as_bool().unwrap_or(false);
            (is == wanted).then_some(())
        });
    };
    assert!(connects(&stand, &server));
    frozen(false);
    let sent = stand.run(|| tcp::upload(server.address(), 2_000_000, 1, Duration::from_secs(2)));
    assert!(sent.is_err(), "{sent:?}");
    frozen(true);
    assert!(used(&stand) < BUDGET + FRAME);
    apply(&stand, &file, &policy(10_000_000, "freeze"));
    frozen(false);
    assert!(connects(&stand, &server));
}

fn a_spent_budget_is_told_once_to_who_reads_events(cell: Cell) {
    let stand = api::Stand::of(cell, &[]);
    let net = &stand.world().net;
    let server = TcpServer::start(net, (cell.server(), 80), TcpService::Streams).unwrap();
    let guest = stand.guest("tap0");
    let put = |budget| stand.put_policy("/v1/policies/small", &policy(budget, "cut"));
    assert!(matches!(put(BUDGET), 200 | 201));
    let vm = json!({ "tap": "tap0", "policy": "small" });
    assert_eq!(stand.ask("PUT", "/v1/vms/a", Some(vm)).0, 201);
    let mut events = Events::read(&stand, "/v1/events?after=0&kind=budget_spent,vm_removed");
    let has_left = |wanted: bool| {
        let of_vm = "slipgate_budget_left_bytes{vm=\"a\",direction=\"tx\"} ";
        eventually("the metric of what is left", || {
            let metrics = stand.metrics();
            let line = metrics.lines().find_map(|line| line.strip_prefix(of_vm))?;
            ((line.parse::<f64>().unwrap() > 0.0) == wanted).then_some(())
        });
    };
    let spend = || guest.run(|| tcp::upload(server.address(), 2_000_000, 1, WAIT));
    for budget in [BUDGET, 2 * BUDGET] {
        assert_eq!(put(budget), 200);
        has_left(true);
        assert!(spend().is_err());
        // Of its direction alone, and no other event before it: it was told once.
        let mut event = events.next();
        event["seq"].take();
        let expected = json!({ "event": "budget_spent", "vm": "a", "direction": "tx",
            "bytes": budget, "seq": null });
        assert_eq!(event, expected);
        has_left(false);
        // More is refused, and told to nobody.
        assert!(spend().is_err());
    }
    assert_eq!(stand.ask("DELETE", "/v1/vms/a", None).0, 204);
    assert_eq!(events.next()["event"], "vm_removed");
}
