//! [`Slipgate`] against a stand-in for the binary, which is this program itself: called with
//! `attach`, `engine` or `flows` it plays that role, else it is the test.

use std::{
    env, fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use slipgate_testbed::{NetNs, PinDir, Slipgate, requirements, slipgate};

fn main() {
    let args: Vec<String> = env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("attach") => attach(&args),
        Some("engine") => std::thread::sleep(Duration::from_secs(60)),
        Some("flows") => println!(
            "{}",
            fs::read_to_string(&args[args.len() - 1]).unwrap_or(FLOWS.into())
        ),
        Some("stats") => println!("no JSON"),
        Some("--list") => println!("control: test"),
        _ => test(),
    }
}

const FLOWS: &str = r#"[{"id":"1-2-3","vm":"a","proto":"tcp","guest":"10.0.2.15:1","remote":"203.0.113.10:2",
    "nat":"198.18.0.2:61000","verdict":"fast","state":"established","rule":null,"tx_packets":1,
    "tx_bytes":2,"rx_packets":3,"rx_bytes":4,"age_ms":5,"idle_ms":6}]"#;

fn attach(args: &[String]) {
    assert_eq!(args[1], "--pin-dir");
    assert!(Path::new(&args[2]).is_dir());
    if args.iter().any(|arg| arg == "--fail") {
        eprintln!("no such flag: --fail");
        std::process::exit(2);
    }
    let myself = env::current_exe().unwrap();
    let mut engine = Command::new(myself);
    engine
        .arg("engine")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut engine = engine.spawn().unwrap();
    println!("some other line\n{} (stand-in)", slipgate::READY);
    eprintln!("it runs");
    engine.wait().unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

fn gone(pid: u32) -> bool {
    let deadline = Instant::now() + Duration::from_secs(5);
    while Instant::now() < deadline {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        if stat
            .rsplit(')')
            .next()
            .is_none_or(|rest| rest.trim().is_empty() || rest.starts_with(" Z"))
        {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

fn test() {
    let started = Instant::now();
    if let Err(why) = requirements::root_and_tun() {
        return requirements::say_skipped(&why);
    }
    // SAFETY: no other thread runs yet.
    unsafe { env::set_var("SLIPGATE_BIN", "/nonexistent/slipgate") };
    let missing = slipgate::binary().unwrap_err().to_string();
    assert!(missing.contains("cargo xtask build"), "{missing}");
    // SAFETY: as above.
    unsafe { env::set_var("SLIPGATE_BIN", env::current_exe().unwrap()) };

    let ns = NetNs::new("control").unwrap();
    let pins = PinDir::new().unwrap();
    let failed = Slipgate::attach(&ns, &pins, &["--fail"])
        .err()
        .unwrap()
        .to_string();
    assert!(
        failed.contains("exit status: 2") && failed.contains("no such flag"),
        "{failed}"
    );

    let mut running = Slipgate::attach(&ns, &pins, &["--tap", "tap0"]).unwrap();
    assert!(running.ready_line().ends_with("(stand-in)") && running.broker_runs());
    assert_eq!(running.flows().unwrap()[0].rx_bytes, 4);
    assert!(running.stats().unwrap_err().to_string().contains("no JSON"));
    let engine = running.kill_engine().unwrap();
    assert!(gone(engine) && running.broker_runs() && running.engine_pid().is_none());
    assert!(running.kill_engine().is_err());
    assert!(
        !running.stop().unwrap().success(),
        "the stand-in dies of SIGTERM"
    );

    let mut second = running.again().unwrap();
    let engine = second.engine_pid().unwrap();
    second.kill_broker().unwrap();
    assert!(!second.broker_runs());
    assert_eq!(
        second.engine_pid(),
        Some(engine),
        "the engine outlives its broker, and is known"
    );
    let third = second.again().unwrap();
    drop(second);
    assert!(gone(engine), "an orphaned engine is killed on drop");
    let broker = third.broker_pid();
    drop((running, third));
    assert!(gone(broker));
    let path = pins.path().to_owned();
    drop(pins);
    assert!(!path.exists());
    println!("test control ... ok\n");
    // As libtest has it: this target has no harness, because it stands in for `slipgate` itself.
    println!(
        "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in \
         {:.2}s",
        started.elapsed().as_secs_f64()
    );
}
