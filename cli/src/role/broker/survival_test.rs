use super::*;
use crate::{args::AttachArgs, config::RuleFlag};

/// A command line with these flags besides, and its policy file.
fn config(flags: &[&str]) -> Config {
    use clap::{Args as _, FromArgMatches as _};
    let command = AttachArgs::augment_args(clap::Command::new("attach"));
    let all = ["attach", "--tap", "tap0"].iter().chain(flags);
    let matches = command.get_matches_from(all);
    let args = AttachArgs::from_arg_matches(&matches).unwrap();
    Config::new(&args, RuleFlag::in_order(&matches)).unwrap()
}

struct Files {
    dir: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let files = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        files.write("list.txt", "203.0.113.0/24\n");
        let other = "default = \"deny\"\nrules = [{ deny_file = \"list.txt\" }]\n";
        files.write("other.toml", other);
        files.write("given.toml", "default = \"allow\"\n");
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// `other.toml` is applied over this command line, and kept.
    fn apply(&self, config: &Config) {
        let other = config.with_policy_file(&self.path("other.toml")).unwrap();
        let loaded = LoadedPolicies::load(&other).unwrap();
        let said = config.said_of_policies();
        keep(&self.path("kept"), &said, &other, &loaded).unwrap();
    }
}

#[test]
fn the_same_command_line_goes_on_with_what_was_applied_as_it_was_then() {
    let files = Files::new();
    let given = files.path("given.toml");
    let config = config(&["--policy", given.to_str().unwrap()]);
    files.apply(&config);
    // Whatever became of the files.
    fs::remove_file(files.path("other.toml")).unwrap();
    files.write("list.txt", "no address\n");
    let (now, loaded, policies) = take_over(&files.path("kept"), &config).unwrap().unwrap();
    assert_eq!(
        now.policy_name(),
        files.path("other.toml").display().to_string()
    );
    assert_eq!(loaded.policies[0].rules.len(), 1);
    let texts: Vec<String> = policies.texts().collect();
    assert!(texts[0].contains("deny"), "{texts:?}");
}

#[test]
fn another_command_line_holds_and_what_was_kept_is_forgotten() {
    let files = Files::new();
    let given = files.path("given.toml");
    let flags = ["--policy", given.to_str().unwrap()];
    let first = config(&flags);
    files.apply(&first);
    let mut more = flags.to_vec();
    more.extend(["--deny", "198.51.100.7"]);
    assert!(
        take_over(&files.path("kept"), &config(&more))
            .unwrap()
            .is_none()
    );
    assert!(take_over(&files.path("kept"), &first).unwrap().is_none());
}

#[test]
fn what_the_command_line_names_is_not_kept() {
    let files = Files::new();
    let given = files.path("given.toml");
    let config = config(&["--policy", given.to_str().unwrap()]);
    files.apply(&config);
    assert!(files.path("kept").exists());
    let loaded = LoadedPolicies::load(&config).unwrap();
    let said = config.said_of_policies();
    keep(&files.path("kept"), &said, &config, &loaded).unwrap();
    assert!(!files.path("kept").exists());
}
