use super::{command, compile::Build, fuzz::Fuzz, run::Run, test::Test};

#[test]
fn the_commands_are_consistent() {
    command().debug_assert();
}

fn matches(args: &[&str]) -> clap::ArgMatches {
    let args = ["xtask"].iter().chain(args);
    let matches = command().try_get_matches_from(args).unwrap();
    let (_, matches) = matches.subcommand().unwrap();
    matches.clone()
}

#[test]
fn each_argument_arrives() {
    let build = Build::of(&matches(&["build", "--bpf-only", "--debug"]));
    assert_eq!(
        format!("{build:?}"),
        "Build { bpf_only: true, guest_only: false, debug: true }"
    );
    let run = Run::of(&matches(&["run", "--guest", "linux"]));
    assert_eq!(
        format!("{run:?}"),
        r#"Run { no_setup: false, guest: Some("linux"), mode: None, args: [] }"#
    );
    let run = Run::of(&matches(&["run", "--mode", "userspace"]));
    assert_eq!(
        format!("{run:?}"),
        r#"Run { no_setup: false, guest: None, mode: Some("userspace"), args: [] }"#
    );
    let run = Run::of(&matches(&["run", "--no-setup"]));
    assert_eq!(
        format!("{run:?}"),
        r#"Run { no_setup: true, guest: None, mode: None, args: [] }"#
    );
    let run = Run::of(&matches(&["run", "--", "stats", "--json"]));
    assert_eq!(
        format!("{run:?}"),
        r#"Run { no_setup: false, guest: None, mode: None, args: ["stats", "--json"] }"#
    );
    let test = Test::of(&matches(&[
        "test",
        "-p",
        "xtask",
        "--package=slipgate",
        "--no-setup",
        "one",
        "two",
    ]));
    assert_eq!(
        format!("{test:?}"),
        r#"Test { no_setup: true, package: ["xtask", "slipgate"], filters: ["one", "two"] }"#
    );
    let fuzz = Fuzz::of(&matches(&["fuzz", "--seconds", "5", "dns"]));
    assert_eq!(
        format!("{fuzz:?}"),
        r#"Fuzz { seconds: 5, target: Some("dns") }"#
    );
    let fuzz = Fuzz::of(&matches(&["fuzz"]));
    assert_eq!(format!("{fuzz:?}"), "Fuzz { seconds: 60, target: None }");
    let bench = matches(&["bench", "--only", "udp", "-x"]);
    assert_eq!(super::words(&bench, "args"), ["--only", "udp", "-x"]);
}

#[test]
fn what_contradicts_is_refused() {
    for args in [
        &["build", "--bpf-only", "--guest-only"][..],
        &["run", "--guest", "linux", "--", "stats"],
        &["run", "--guest", "windows"],
        &["abi", "--unreleased"],
        &["fuzz", "--seconds", "some"],
        &[],
    ] {
        let args = ["xtask"].iter().chain(args);
        assert!(command().try_get_matches_from(args).is_err());
    }
}
