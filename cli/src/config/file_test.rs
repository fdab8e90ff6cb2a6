use super::*;

fn flags_of(text: &str) -> Result<Vec<String>, String> {
    let flags = flags(Path::new("slipgate.toml"), text).map_err(|e| e.to_string())?;
    Ok(flags
        .into_iter()
        .map(|flag| flag.into_string().unwrap())
        .collect())
}

#[test]
fn keys_are_flags() {
    let text = "uplink = \"eth0\"\nmax-flows = 100\nbpf-log = true\ndns = [\"192.0.2.1\", \"192.0.2.2\"]\n";
    assert_eq!(
        flags_of(text).unwrap(),
        [
            "--bpf-log",
            "--dns=192.0.2.1",
            "--dns=192.0.2.2",
            "--max-flows=100",
            "--uplink=eth0"
        ]
    );
    assert_eq!(flags_of("bpf-log = false").unwrap(), Vec::<String>::new());
}

#[test]
fn what_is_no_flag_is_named() {
    for (text, part) in [
        ("colour = 1", "no flag --colour"),
        ("config = \"other.toml\"", "no flag --config"),
        ("vm = \"name=a,tap=b\"", "no flag --vm"),
        ("mtu = 1.5", "mtu: that is no value"),
        ("dns = [[\"a\"]]", "dns: that is no value"),
        ("allow = \"a\"", "allow: rules have an order"),
        ("uplink = ", "slipgate.toml"),
    ] {
        let error = flags_of(text).unwrap_err();
        assert!(error.contains(part), "{text}: {error}");
    }
}

/// The file that packages install.
const PACKAGED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/slipgate.toml");

/// Its text with the examples that are commented out, which are lines like `#uplink = "eth0"`.
fn packaged_with_examples() -> String {
    let text = std::fs::read_to_string(PACKAGED).unwrap();
    let lines = text.lines().map(|line| match line.strip_prefix('#') {
        Some(example) if example.starts_with(|c: char| c.is_ascii_lowercase()) => example,
        _ => line,
    });
    lines.map(|line| format!("{line}\n")).collect()
}

fn serve_args(text: &str) -> crate::args::ServeArgs {
    let flags = flags_of(text).unwrap();
    let typed = ["slipgate", SERVE].map(str::to_owned).into_iter();
    let parsed = <CommandLine as clap::Parser>::try_parse_from(typed.chain(flags));
    match parsed.unwrap_or_else(|e| panic!("{e}")).command {
        crate::args::Command::Serve(args) => *args,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_packaged_file_is_one_that_serve_takes() {
    let text = std::fs::read_to_string(PACKAGED).unwrap();
    let args = serve_args(&text);
    let config = crate::config::serve(&args, Vec::new()).unwrap();
    assert_eq!(config.api.len(), 2);
}

#[test]
fn each_example_of_the_packaged_file_is_valid_and_each_flag_has_one() {
    let text = packaged_with_examples();
    let mut args = serve_args(&text);
    // The only one that is read here, and it is not there.
    assert_eq!(
        args.nat.policy.take().unwrap(),
        Path::new("/etc/slipgate/policy.toml")
    );
    args.nat.policy_name = None;
    crate::config::serve(&args, Vec::new()).unwrap();

    let table: toml::Table = text.parse().unwrap();
    let command = CommandLine::command();
    let serve = command.find_subcommand(SERVE).unwrap();
    for flag in serve.get_arguments().filter_map(|arg| arg.get_long()) {
        // A daemon has no VM at its start that a port could lead to, and takes over once.
        let has_none = ["config", "forward", "take-over"].contains(&flag) || RULES.contains(&flag);
        assert_eq!(table.contains_key(flag), !has_none, "{flag}");
    }
}

/// The arguments of one command alone mean what those of all commands do.
#[test]
fn a_command_alone_is_parsed_as_among_all() {
    let parsed = |matches: &ArgMatches| {
        use clap::FromArgMatches as _;
        format!("{:?}", CommandLine::from_arg_matches(matches).unwrap())
    };
    for line in [
        "slipgate run",
        "slipgate run --restore warm --name a --allow tcp:*:443 --deny 10.0.0.0/8 --deny b",
        "slipgate run --kernel k --cmdline quiet --disk d,ro --vsock 3,s --forward tcp:8080:80",
        "slipgate-vmm vmm --fd 3 --user 1",
        "slipgate-engine engine --fd 3 --user 1",
    ] {
        let words: Vec<_> = line.split(' ').map(OsString::from).collect();
        let alone = of_one_command(&words).unwrap_or_else(|| panic!("{line}"));
        let among_all = CommandLine::command().get_matches_from(&words);
        assert_eq!(parsed(&alone), parsed(&among_all));
        assert_eq!(alone.subcommand_name(), among_all.subcommand_name());
    }
    for line in [
        "slipgate",
        "slipgate serve",
        "slipgate run --help",
        "slipgate run --nonsense",
        "slipgate --version",
    ] {
        let words: Vec<_> = line.split(' ').map(OsString::from).collect();
        assert!(of_one_command(&words).is_none(), "{line}");
    }
}
