//! Another policy while the guest runs: what it denies ends, and what it permits goes on.

use std::{
    fs::{self, Permissions},
    io::{ErrorKind, Read as _},
    net::{IpAddr, TcpStream},
    os::unix::fs::PermissionsExt as _,
};

use slipgate_testbed::{
    clients::{
        tcp::{self, EchoSession},
        udp::{self, UdpOutcome},
    },
    servers::{TcpServer, TcpService, UdpServer, UdpService},
};

use crate::{
    Cell, Stand, WAIT, eventually,
    matrix::{at, matrix},
};

matrix! {
    what_a_new_policy_denies_ends_and_is_recorded_and_the_rest_goes_on: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_policy_that_is_wrong_changes_nothing: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_port_of_the_hosts_loopback_that_is_taken_out_ends: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_signal_has_the_files_read_again: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

/// A policy file with a mistake.
const WRONG: &str = "default = \"deny\"\nrules = [{ alow = \"x\" }]\n";

/// A stand with a policy file, which the test writes again.
struct Scene {
    stand: Stand,
    file: tempfile::TempPath,
}

impl Scene {
    fn new(cell: Cell, text: &str) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        fs::write(&file, text).unwrap();
        // As a user without privileges, too.
        fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        let stand = Stand::of(cell, &["--policy", file.to_str().unwrap()]);
        Self { stand, file }
    }

    fn serve(&self, port: u16) -> TcpServer<IpAddr> {
        let address = (self.stand.cell.server(), port);
        TcpServer::start(&self.stand.world.net, address, TcpService::Echo).unwrap()
    }

    fn apply(&self, text: &str) -> String {
        fs::write(&self.file, text).unwrap();
        let applied = self.stand.slipgate.run(&["policy", "apply"]).unwrap();
        assert!(applied.status.success(), "{applied:?}");
        String::from_utf8(applied.stdout).unwrap()
    }

    fn echoing(&self, to: impl Into<std::net::SocketAddr>) -> TcpStream {
        let to = to.into();
        let mut stream = self.stand.run(|| tcp::connect(to, WAIT)).unwrap();
        EchoSession::new(&mut stream).round(100).unwrap();
        stream
    }

    /// How the flows to a destination ended, once that many have.
    fn ends(&self, remote: &str, count: usize) -> Vec<String> {
        eventually("the ends are recorded", || {
            let mut ends = self.stand.events("flow_end");
            ends.retain(|end| end["remote"] == remote);
            let how = ends
                .iter()
                .map(|end| end["end"].as_str().unwrap().to_owned());
            (ends.len() == count).then(|| how.collect())
        })
    }
}

fn is_reset(stream: &mut TcpStream) {
    let error = stream.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

fn what_a_new_policy_denies_ends_and_is_recorded_and_the_rest_goes_on(cell: Cell) {
    let scene = Scene::new(cell, "default = \"allow\"\n");
    let (stays, goes) = (scene.serve(7000), scene.serve(7001));
    let datagrams = (cell.server(), 7001);
    let datagrams = UdpServer::start(&scene.stand.world.net, datagrams, UdpService::Echo).unwrap();
    let mut kept = scene.echoing(stays.address());
    let mut cut = scene.echoing(goes.address());
    let asked = || {
        scene
            .stand
            .run(|| udp::probe(datagrams.address(), b"x", WAIT))
    };
    assert!(matches!(asked().unwrap(), UdpOutcome::Answered(_)));

    let text = format!(
        "default = \"allow\"\nrules = [{{ deny = \"{}\" }}]\n",
        cell.destination(cell.server(), "7001")
    );
    let said = scene.apply(&text);
    assert!(said.contains("2 flows cut, 1 go on"), "{said}");
    is_reset(&mut cut);
    assert_eq!(scene.ends(&goes.address().to_string(), 2), ["policy"; 2]);
    EchoSession::new(&mut kept).round(100).unwrap();
    let accepted = goes.accepted();
    scene
        .stand
        .run(|| tcp::expect_refused(goes.address()))
        .unwrap();
    assert!(matches!(asked().unwrap(), UdpOutcome::Refused(..)));
    assert_eq!((goes.accepted(), datagrams.datagrams()), (accepted, 1));
    let to = goes.address().to_string();
    let (is_admitted, why) = scene.stand.slipgate.why("tap0", &to, "tcp").unwrap();
    assert!(!is_admitted && why.contains("7001"), "{why}");

    let said = scene.apply("default = \"allow\"\n");
    assert!(said.contains("0 flows cut"), "{said}");
    scene.echoing(goes.address());
    EchoSession::new(&mut kept).round(100).unwrap();
}

fn a_policy_that_is_wrong_changes_nothing(cell: Cell) {
    let scene = Scene::new(cell, "default = \"allow\"\n");
    let server = scene.serve(7000);
    let mut kept = scene.echoing(server.address());
    fs::write(&scene.file, WRONG).unwrap();
    let refused = scene.stand.slipgate.run(&["policy", "apply"]).unwrap_err();
    assert!(
        refused.to_string().contains("nothing has changed"),
        "{refused}"
    );
    EchoSession::new(&mut kept).round(100).unwrap();
    scene.echoing(server.address());
    // And it serves on.
    let said = scene.apply("default = \"deny\"\n");
    assert!(said.contains("flow"), "{said}");
    is_reset(&mut kept);
}

fn a_port_of_the_hosts_loopback_that_is_taken_out_ends(cell: Cell) {
    let policy =
        |ports: &str| format!("default = \"deny\"\nhost_loopback = {{ ports = [{ports}] }}\n");
    let scene = Scene::new(cell, &policy("8080, 8081"));
    let host = &scene.stand.world.host;
    let _servers = [8080, 8081]
        .map(|port| TcpServer::start(host, (cell.loopback(), port), TcpService::Echo).unwrap());
    let [mut stays, mut goes] = [8080, 8081].map(|port| scene.echoing(at(cell.gateway(), port)));
    scene.apply(&policy("8080"));
    is_reset(&mut goes);
    let out = at(cell.gateway(), 8081);
    scene.stand.run(|| tcp::expect_refused(out)).unwrap();
    EchoSession::new(&mut stays).round(100).unwrap();
    assert_eq!(scene.ends(&out.to_string(), 1), ["policy"]);
}

fn a_signal_has_the_files_read_again(cell: Cell) {
    let scene = Scene::new(cell, "default = \"allow\"\n");
    let server = scene.serve(7000);
    let mut cut = scene.echoing(server.address());
    let broker = scene.stand.slipgate.broker_pid() as libc::pid_t;
    let signal = |text: &str| {
        fs::write(&scene.file, text).unwrap();
        // SAFETY: a number and a signal.
        assert_eq!(unsafe { libc::kill(broker, libc::SIGHUP) }, 0);
    };
    signal(WRONG);
    scene.stand.says("the policy stays as it was");
    EchoSession::new(&mut cut).round(100).unwrap();
    // Where nothing has changed no flow is judged again.
    signal("default = \"allow\"\n");
    scene.stand.says("0 flows cut, 0 go on");
    EchoSession::new(&mut cut).round(100).unwrap();
    signal("default = \"deny\"\n");
    is_reset(&mut cut);
    scene
        .stand
        .run(|| tcp::expect_refused(server.address()))
        .unwrap();
}
