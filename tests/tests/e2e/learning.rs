//! `slipgate policy learn` for a running VM.

use std::{
    fs,
    io::Read as _,
    net::{IpAddr, SocketAddr},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use slipgate_testbed::{
    GuestConfig, WorldConfig,
    clients::{
        dns,
        tcp::{self, EchoSession},
    },
    dns_wire::Record,
    servers::{Answer, DnsServer, TcpServer, TcpService, Zone},
    slipgate::binary,
    world::SERVER,
};

use crate::{
    Cell, Stand, WAIT, eventually,
    matrix::{at, matrix},
};

matrix! {
    what_an_open_vm_does_is_let_in_by_what_is_learnt_and_nothing_else: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "user mode opens no VM for learning";
    nothing_of_an_open_vm_goes_on_by_what_its_policy_leaves_or_inspects: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "user mode opens no VM for learning";
    a_vm_that_was_open_when_slipgate_died_is_closed_by_the_next_start: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "user mode opens no VM for learning";
    a_vm_is_closed_again_when_who_learns_is_killed: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "user mode opens no VM for learning";
    a_vm_is_closed_again_when_the_engine_dies_while_it_is_open: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "user mode opens no VM for learning";
    of_two_vms_that_are_open_each_is_closed_by_itself: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "user mode opens no VM for learning";
    no_flow_is_too_short_to_be_seen_and_those_that_live_are: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

const REFUSED: u8 = 5;
const PORT: u16 = 7000;

/// A running `policy learn`.
struct Learn {
    child: Child,
    said: Arc<Mutex<String>>,
}

impl Learn {
    fn start(stand: &Stand, args: &[&str]) -> Learn {
        Self::of(stand, "tap0", args)
    }

    fn of(stand: &Stand, vm: &str, args: &[&str]) -> Learn {
        let all = [&["policy", "learn", vm], args].concat();
        let mut command = stand.slipgate.command(&all).unwrap();
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = stand.world.host.spawn(command).unwrap();
        let said = Arc::new(Mutex::new(String::new()));
        let (mut stderr, kept) = (child.stderr.take().unwrap(), said.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 1_000];
            while let Ok(n @ 1..) = stderr.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..n]);
                kept.lock().unwrap().push_str(&text);
            }
        });
        let learn = Learn { child, said };
        eventually("it listens", || {
            let listening = format!("listening to {vm}");
            learn.said().contains(&listening).then_some(())
        });
        learn
    }

    fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    fn kill(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// Ends it. Returns its status and the policy that it printed.
    fn end(mut self) -> (ExitStatus, String) {
        let mut printed = String::new();
        let mut stdout = self.child.stdout.take().unwrap();
        stdout.read_to_string(&mut printed).unwrap();
        (self.child.wait().unwrap(), printed)
    }
}

fn resolver(stand: &Stand) -> DnsServer {
    let first = Answer::address(stand.cell.server(), 300);
    let second = Answer::address(stand.cell.server_2(), 300);
    let zone = Zone::from([
        ("one.example.test".into(), first),
        ("two.example.test".into(), second.clone()),
        ("other.example.test".into(), second.clone()),
        ("evil.test".into(), second),
    ]);
    // Slipgate's own resolver is of IPv4, whatever the guest is.
    DnsServer::start(&stand.world.net, (SERVER, 53), zone).unwrap()
}

/// The code, and the address.
fn ask(stand: &Stand, name: &str) -> (u8, Vec<IpAddr>) {
    let (question, server) = (stand.cell.question(name), at(stand.cell.dns(), 53));
    let found = stand.run(|| dns::ask_udp(server, &question, WAIT)).unwrap();
    let ips = found.reply.records.iter().filter_map(Record::ip);
    (found.reply.code, ips.collect())
}

/// Asks for a name and says hello to it; the connection.
fn visit(stand: &Stand, name: &str) -> std::net::TcpStream {
    let (code, addresses) = ask(stand, name);
    assert_eq!((code, addresses.len()), (0, 1), "{name}");
    stand
        .run(|| tcp::connect(at(addresses[0], PORT), WAIT))
        .unwrap()
}

fn is_open(stand: &Stand) -> bool {
    is_open_to(stand, at(stand.cell.server(), PORT))
}

fn is_open_to(stand: &Stand, to: SocketAddr) -> bool {
    let to = to.to_string();
    stand.slipgate.why("tap0", &to, "tcp").unwrap().0
}

fn what_an_open_vm_does_is_let_in_by_what_is_learnt_and_nothing_else(cell: Cell) {
    let resolvers = SERVER.to_string();
    let args = [
        "--dns",
        &resolvers,
        "--default",
        "deny",
        "--deny",
        "evil.test",
    ];
    let stand = Stand::of(cell, &args);
    let _resolver = resolver(&stand);
    let servers = [cell.server(), cell.server_2()].map(|address| {
        TcpServer::start(&stand.world.net, (address, PORT), TcpService::Hold).unwrap()
    });
    assert!(!is_open(&stand));
    assert_eq!(ask(&stand, "one.example.test").0, REFUSED);

    let learn = Learn::start(&stand, &["--open"]);
    assert!(is_open(&stand));
    stand.says("tap0 is open, to learn");
    drop(visit(&stand, "one.example.test"));
    let mut lives = visit(&stand, "two.example.test");
    // What is denied on purpose stays so, and so does protected space.
    assert_eq!(ask(&stand, "evil.test").0, REFUSED);
    let metadata = match cell.is_ipv6() {
        true => "[fd00:ec2::254]:80",
        false => "169.254.169.254:80",
    };
    assert!(!is_open_to(&stand, metadata.parse().unwrap()));
    // Who wants it open as well is told; it stays open when a policy is applied.
    let error = stand
        .slipgate
        .run(&["policy", "learn", "tap0", "--open"])
        .unwrap_err();
    assert!(error.to_string().contains("open already"), "{error}");
    stand.slipgate.run(&["policy", "apply"]).unwrap();
    assert!(is_open(&stand));
    learn.kill(Signal::SIGINT);
    let (status, learnt) = learn.end();
    assert_eq!(status.code(), Some(0));
    let expected = "# The least policy for the recorded flows of tap0: 2 flows, 2 rules.\n\
                    default = \"deny\"\n\
                    rules = [\n  \
                      { allow = \"one.example.test:7000/tcp\" }, # 1 flow\n  \
                      { allow = \"two.example.test:7000/tcp\" }, # 1 flow\n\
                    ]\n";
    assert_eq!(learnt, expected);

    // It has its own policy again by then, and what that does not let in is cut.
    assert!(!is_open(&stand));
    lives.set_read_timeout(Some(WAIT)).unwrap();
    let error = stand.run(|| lives.read(&mut [0; 1])).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(ask(&stand, "two.example.test").0, REFUSED);
    stand
        .run(|| tcp::expect_refused(servers[1].address()))
        .unwrap();

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("learnt.toml");
    fs::write(&file, learnt).unwrap();
    let file = file.to_str().unwrap();
    let mut check = Command::new(binary().unwrap());
    check.args(["policy", "check", "--strict", file]);
    assert!(check.output().unwrap().status.success());
    stand.slipgate.run(&["policy", "apply", file]).unwrap();
    drop(visit(&stand, "one.example.test"));
    drop(visit(&stand, "two.example.test"));
    assert_eq!(ask(&stand, "other.example.test").0, REFUSED);
    stand
        .run(|| tcp::expect_refused(at(cell.server_2(), PORT + 1)))
        .unwrap();
}

fn a_vm_is_closed_again_when_who_learns_is_killed(cell: Cell) {
    let stand = Stand::of(cell, &["--default", "deny"]);
    let server = at(cell.server(), PORT);
    let _server =
        TcpServer::start(&stand.world.net, (server.ip(), PORT), TcpService::Hold).unwrap();
    let learn = Learn::start(&stand, &["--open"]);
    let mut stream = stand.run(|| tcp::connect(server, WAIT)).unwrap();
    learn.kill(Signal::SIGKILL);
    eventually("it is closed", || (!is_open(&stand)).then_some(()));
    stream.set_read_timeout(Some(WAIT)).unwrap();
    assert!(stand.run(|| stream.read(&mut [0; 1])).is_err(), "it is cut");
    stand.run(|| tcp::expect_refused(server)).unwrap();
    learn.end();
    // And may be opened again.
    let learn = Learn::start(&stand, &["--open", "--for", "1s"]);
    assert!(is_open(&stand));
    assert_eq!(learn.end().0.code(), Some(0));
    assert!(!is_open(&stand));
}

/// Who learns hears nothing of the next engine, and ends.
fn a_vm_is_closed_again_when_the_engine_dies_while_it_is_open(cell: Cell) {
    let mut stand = Stand::of(cell, &["--default", "deny"]);
    let server = at(cell.server(), PORT);
    let _server =
        TcpServer::start(&stand.world.net, (server.ip(), PORT), TcpService::Hold).unwrap();
    let learn = Learn::start(&stand, &["--open"]);
    let mut stream = stand.run(|| tcp::connect(server, WAIT)).unwrap();
    stand.slipgate.kill_engine().unwrap();
    stand.says("a new engine serves");
    learn.end();
    eventually("it is closed", || (!is_open(&stand)).then_some(()));
    stream.set_read_timeout(Some(WAIT)).unwrap();
    assert!(stand.run(|| stream.read(&mut [0; 1])).is_err(), "it is cut");
    stand.run(|| tcp::expect_refused(server)).unwrap();
    assert!(stand.slipgate.broker_runs());
}

/// A policy that leaves flows at a reload, with one admitted port, one inspected port and one that
/// leads to the host's loopback; and the guest's flows while it is open.
struct Scene {
    stand: Stand,
    _servers: Vec<TcpServer<IpAddr>>,
    _dir: tempfile::TempDir,
}

const INSPECTED: u16 = PORT + 1;
const OTHER: u16 = PORT + 2;

impl Scene {
    fn new(cell: Cell) -> Scene {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("own.toml");
        let [own, inspected, gateway] = [
            (cell.server(), PORT),
            (cell.server(), INSPECTED),
            (cell.gateway(), PORT),
        ]
        .map(|(address, port)| at(address, port));
        let own = format!(
            "default = \"deny\"\non_reload = \"keep\"\nrules = [{{ allow = \"{own}\" }}, \
             {{ inspect = [\"{inspected}\", \"{gateway}\"] }}]\n\
             [host_loopback]\nports = [{PORT}]\n"
        );
        fs::write(&file, own).unwrap();
        let stand = Stand::of(cell, &["--policy", file.to_str().unwrap()]);
        let echo = |namespace, address, port| {
            TcpServer::start(namespace, (address, port), TcpService::Echo).unwrap()
        };
        let (net, host) = (&stand.world.net, &stand.world.host);
        let mut servers = vec![echo(host, cell.loopback(), PORT)];
        servers.extend([PORT, INSPECTED, OTHER].map(|port| echo(net, cell.server(), port)));
        Scene {
            stand,
            _servers: servers,
            _dir: dir,
        }
    }

    /// Where its own policy lets it, and where not.
    fn visit(&self) -> (std::net::TcpStream, [std::net::TcpStream; 3]) {
        let visit = |address, port| {
            let mut stream = self
                .stand
                .run(|| tcp::connect(at(address, port), WAIT))
                .unwrap();
            self.stand
                .run(|| EchoSession::new(&mut stream).round(100))
                .unwrap();
            stream
        };
        let cell = self.stand.cell;
        let (server, gateway) = (cell.server(), cell.gateway());
        let others = [(server, INSPECTED), (server, OTHER), (gateway, PORT)];
        let others = others.map(|(address, port)| visit(address, port));
        (visit(server, PORT), others)
    }

    fn is_closed(&self, (own, others): (std::net::TcpStream, [std::net::TcpStream; 3])) {
        let round = |mut stream: std::net::TcpStream| {
            self.stand
                .run(|| EchoSession::new(&mut stream).round(100).is_ok())
        };
        assert!(round(own), "its own policy lets it go on");
        assert_eq!(others.map(round), [false; 3]);
        assert!(!self.is_open());
    }

    fn is_open(&self) -> bool {
        is_open_to(&self.stand, at(self.stand.cell.server(), OTHER))
    }
}

fn nothing_of_an_open_vm_goes_on_by_what_its_policy_leaves_or_inspects(cell: Cell) {
    let scene = Scene::new(cell);
    let learn = Learn::start(&scene.stand, &["--open"]);
    let visited = scene.visit();
    // No change of what is in force while it is open closes it, or keeps it open.
    scene.stand.slipgate.run(&["policy", "apply"]).unwrap();
    scene.stand.slipgate.run(&["freeze", "tap0"]).unwrap();
    learn.kill(Signal::SIGKILL);
    eventually("it is closed", || (!scene.is_open()).then_some(()));
    scene.stand.slipgate.run(&["thaw", "tap0"]).unwrap();
    scene.is_closed(visited);
    learn.end();
}

fn of_two_vms_that_are_open_each_is_closed_by_itself(cell: Cell) {
    let (world, neighbours) = (WorldConfig::default(), [GuestConfig::new("tap1")]);
    let stand = Stand::of_several(cell, world, &[], &neighbours, &["--default", "deny"]);
    let address = (cell.server(), PORT);
    let echo = TcpServer::start(&stand.world.net, address, TcpService::Echo).unwrap();
    let is_open = |vm: &str| {
        let to = echo.address().to_string();
        stand.slipgate.why(vm, &to, "tcp").unwrap().0
    };
    let learns = ["tap0", "tap1"].map(|vm| Learn::of(&stand, vm, &["--open"]));
    assert!(is_open("tap0") && is_open("tap1"));
    let visit = || tcp::connect(echo.address(), WAIT).unwrap();
    let mut streams = [stand.run(visit), stand.neighbours[0].run(visit)];
    let [first, second] = learns;
    first.kill(Signal::SIGKILL);
    eventually("the first one is closed", || {
        (!is_open("tap0")).then_some(())
    });
    assert!(is_open("tap1"));
    let mut lives = |at: usize| {
        let stream = &mut streams[at];
        stand.run(|| EchoSession::new(stream).round(100).is_ok())
    };
    assert!(!lives(0) && lives(1));
    second.kill(Signal::SIGKILL);
    eventually("so is the other", || (!is_open("tap1")).then_some(()));
    assert!(!lives(1));
    first.end();
    second.end();
}

fn a_vm_that_was_open_when_slipgate_died_is_closed_by_the_next_start(cell: Cell) {
    let mut scene = Scene::new(cell);
    let mut learn = Learn::start(&scene.stand, &["--open"]);
    let visited = scene.visit();
    let slipgate = &mut scene.stand.slipgate;
    slipgate.kill_both().unwrap();
    eventually("their end", || {
        slipgate.engine_pid().is_none().then_some(())
    });
    learn.child.wait().unwrap();
    scene.stand.again();
    scene.is_closed(visited);
}

fn no_flow_is_too_short_to_be_seen_and_those_that_live_are(cell: Cell) {
    let resolvers = SERVER.to_string();
    let stand = Stand::of(cell, &["--dns", &resolvers, "--flow-log-events", "refused"]);
    let _resolver = resolver(&stand);
    let [server, other] = [cell.server(), cell.server_2()].map(|address| {
        TcpServer::start(&stand.world.net, (address, PORT), TcpService::Hold).unwrap()
    });
    let _lives = stand.run(|| tcp::connect(other.address(), WAIT)).unwrap();
    let learn = Learn::start(&stand, &[]);
    ask(&stand, "one.example.test");
    const FLOWS: usize = 300;
    for _ in 0..FLOWS {
        drop(stand.run(|| tcp::connect(server.address(), WAIT)).unwrap());
    }
    learn.kill(Signal::SIGTERM);
    let (status, learnt) = learn.end();
    assert_eq!(status.code(), Some(0));
    let by_address = cell.destination(cell.server_2(), "7000/tcp");
    let expected = format!(
        "# The least policy for the recorded flows of tap0: {} flows, 2 rules.\n\
         default = \"deny\"\n\
         rules = [\n  \
           {{ allow = \"one.example.test:7000/tcp\" }}, # {FLOWS} flows\n  \
           {{ allow = \"{by_address}\" }}, # 1 flow\n\
         ]\n",
        FLOWS + 1
    );
    assert_eq!(learnt, expected);
    // The flow log has no more than it was to have.
    assert!(stand.log().is_empty());
    let error = stand.slipgate.run(&["policy", "learn", "nobody"]);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("no VM \"nobody\" is served; there is tap0"),
        "{error}"
    );
}
