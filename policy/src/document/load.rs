//! Policies with all their files read and all rules checked, ready to be sent to the engine.
use std::{collections::BTreeMap, io, ops::Range, path::Path};

use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::{
    egress,
    error::ConfigError,
    file::PolicyFile,
    host_loopback, idle, meaning, nat,
    overrides::CliOverrides,
    rule_flag::{DENY_FILE, RuleFlag, parse},
    schema::{DefaultText, NamedPolicy, RoutesOf, RuleEntry},
    sleep, timers,
};
use crate::{
    Action, AnnotatedRule, DenyFile, DenyFileError, DnsSettings, Http, Note, Policy, PolicySet,
    Resolvers, Rule, Settings,
};

/// All policies of a process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LoadedPolicies {
    /// The policy without a name, then the named ones. A VM refers to its own by the index here.
    pub policies: Vec<LoadedPolicy>,
}

/// One policy, not compiled yet.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LoadedPolicy {
    /// Settings beside the rules.
    pub settings: Settings,
    /// Action where no rule matches.
    pub default: Action,
    /// Rules in the order in which they are tried.
    pub rules: Vec<LoadedRule>,
}

/// One rule, not parsed yet.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LoadedRule {
    /// Text of the rule.
    pub rule: RuleText,
    /// Metadata: where it was written, and why.
    pub note: Note,
}

/// Text of a rule.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum RuleText {
    /// An action and a pattern.
    Match(Action, String),
    /// A file of patterns that are denied.
    DenyFile {
        /// Path of the file, as shown.
        name: String,
        /// Contents of the file.
        text: String,
    },
}

/// Function that reads a file's text: from the disk, or from a test's data.
pub type Reader<'r> = &'r dyn Fn(&Path) -> io::Result<String>;

impl LoadedPolicies {
    /// Texts of the deny files, by the paths under which they were read.
    pub fn deny_files(&self) -> BTreeMap<String, String> {
        let policies = self.policies.iter();
        policies.flat_map(LoadedPolicy::deny_files).collect()
    }

    /// Loads the policies of the flags and of a policy file. `read` reads the deny files.
    ///
    /// # Errors
    /// A rule or setting cannot be used, a default is missing, or a deny file cannot be read.
    pub fn of(
        typed: &CliOverrides,
        file: Option<&PolicyFile>,
        read: Reader<'_>,
    ) -> Result<Self, ConfigError> {
        let typed = Flags {
            rules: typed_rules(&typed.rules, read)?,
            default: typed.default,
            resolvers: typed.resolvers()?,
            routes: typed.egress_routes,
        };
        let Some(file) = file else {
            let dns = DnsSettings {
                resolvers: typed.resolvers.unwrap_or_default(),
                ..DnsSettings::default()
            };
            let policy = LoadedPolicy {
                settings: Settings {
                    dns,
                    egress: egress::by_flag(typed.routes),
                    ..Settings::default()
                },
                default: typed.default.unwrap_or(Action::Allow),
                rules: typed.rules,
            };
            return Ok(Self {
                policies: vec![policy],
            });
        };
        let top = file.document.top_level();
        let named = file.document.policy.iter();
        let named = named.map(|(name, policy)| (Some(name), policy));
        let all = [(None, &top)].into_iter().chain(named);
        let policies = all.map(|(name, policy)| policy.load(name, file, &typed, read));
        Ok(Self {
            policies: policies.collect::<Result<_, _>>()?,
        })
    }

    /// Compiles the policies.
    ///
    /// # Errors
    /// A rule or a line of a deny file cannot be parsed.
    pub fn compile(&self) -> Result<PolicySet, ConfigError> {
        let policies = self.policies.iter().map(LoadedPolicy::compile);
        Ok(PolicySet::new(policies.collect::<Result<_, _>>()?))
    }
}

/// Flags of the command line. Their rules come before the file's, and their values override it.
struct Flags {
    rules: Vec<LoadedRule>,
    default: Option<Action>,
    resolvers: Option<Resolvers>,
    routes: Option<RoutesOf>,
}

impl NamedPolicy {
    /// `name`: `None` for the top level of the file.
    fn load(
        &self,
        name: Option<&Spanned<String>>,
        file: &PolicyFile,
        typed: &Flags,
        read: Reader<'_>,
    ) -> Result<LoadedPolicy, ConfigError> {
        if let Some(name) = name {
            let checked = meaning::check_name("", name.get_ref(), name.get_ref());
            checked.map_err(|e| file.error(&name.span(), e.problem, e.remedy))?;
        }
        let mut rules = typed.rules.clone();
        for entry in &self.rules {
            rules.extend(rules_of(file, entry, read)?);
        }
        let settings = Settings {
            name: name.map(|name| name.get_ref().clone()),
            file: Some(file.name()),
            on_reload: self.on_reload.unwrap_or_default(),
            dns: meaning::dns_settings(file, &self.dns, typed.resolvers.clone())?,
            timers: timers::of_file(file, &self.timers)?,
            nat: nat::of_file(file, &self.nat)?,
            nat_addresses: egress::pool_of_file(file, &self.nat_addresses)?,
            egress: egress::of_file(file, &self.egress, typed.routes)?,
            sleep: sleep::of_file(file, &self.sleep)?,
            idle: idle::of_file(&self.idle),
            host_loopback: host_loopback::of_file(file, &self.host_loopback)?,
            is_learning: false,
        };
        Ok(LoadedPolicy {
            settings,
            default: self.default(name, file, typed.default)?,
            rules,
        })
    }

    /// Returns the default of the flags, else that of the file. A file must give it: a missing
    /// default (in a truncated file, for one) must not decide by accident.
    fn default(
        &self,
        name: Option<&Spanned<String>>,
        file: &PolicyFile,
        typed: Option<Action>,
    ) -> Result<Action, ConfigError> {
        let said = self.default.as_ref().map(|said| match said.get_ref() {
            DefaultText::Allow => Action::Allow,
            DefaultText::Deny => Action::Deny,
        });
        if let Some(default) = typed.or(said) {
            return Ok(default);
        }
        if name.is_none() && !meaning::has_top_level(&file.document) {
            // No VM can have it.
            return Ok(Action::Deny);
        }
        let first = self.rules.first().map(Spanned::span);
        let span = name.map(Spanned::span).or(first);
        Err(file.error(
            &span.unwrap_or_default(),
            match name {
                Some(name) => format!("the policy {} has no default", name.get_ref()),
                None => "no default is given".to_owned(),
            },
            "write default = \"deny\" to refuse flows that no rule matches, or \"allow\" to admit them",
        ))
    }
}

fn rules_of(
    file: &PolicyFile,
    entry: &Spanned<RuleEntry>,
    read: Reader<'_>,
) -> Result<Vec<LoadedRule>, ConfigError> {
    let RuleEntry {
        allow,
        inspect,
        deny,
        deny_file,
        http,
        comment,
    } = entry.get_ref();
    let said = [
        (Action::Allow, allow),
        (Action::Inspect, inspect),
        (Action::Deny, deny),
    ];
    let said: Vec<_> = said
        .into_iter()
        .filter_map(|(action, patterns)| Some((action, patterns.as_ref()?)))
        .collect();
    if said.len() + usize::from(deny_file.is_some()) != 1 {
        return Err(file.error(
            &entry.span(),
            "a rule says exactly one of allow, inspect, deny and deny_file",
            "write one rule for each, in the order in which they are to be tried",
        ));
    }
    if let (Some(http), None) = (http, inspect) {
        let problem = "http applies only to inspected flows";
        return Err(file.error(&http.span(), problem, "write it beside inspect"));
    }
    let note = |span: &Range<usize>| Note {
        place: Some(file.line(span)),
        comment: comment.clone(),
        http: http
            .as_ref()
            .map_or_else(Http::default, |http| *http.get_ref()),
    };
    if let Some(list) = deny_file {
        let path = file.beside(list.get_ref());
        let unreadable = |e| {
            let problem = format!("{} can't be read ({e})", path.display());
            file.error(
                &list.span(),
                problem,
                "give a text file with one pattern a line",
            )
        };
        let text = read(&path).map_err(unreadable)?;
        let name = path.display().to_string();
        DenyFile::parse(&name, &text).map_err(|e| bad_line("deny_file", &e))?;
        return Ok(vec![LoadedRule {
            rule: RuleText::DenyFile { name, text },
            note: note(&list.span()),
        }]);
    }
    let mut rules = Vec::new();
    for (action, patterns) in said {
        for (text, span) in patterns.get_ref().each(patterns.span()) {
            Rule::parse(action, text).map_err(|e| {
                let remedy = "write CIDR or NAME[:PORT[-PORT]][/tcp|udp|icmp]";
                file.error(&span, e.to_string(), remedy)
            })?;
            rules.push(LoadedRule {
                rule: RuleText::Match(action, text.to_owned()),
                note: note(&span),
            });
        }
    }
    Ok(rules)
}

fn typed_rules(typed: &[RuleFlag], read: Reader<'_>) -> Result<Vec<LoadedRule>, ConfigError> {
    let rules = typed.iter().map(|rule| {
        Ok(LoadedRule {
            rule: match rule {
                RuleFlag::Match(action, text) => RuleText::Match(*action, text.clone()),
                RuleFlag::DenyFile(path) => RuleText::DenyFile {
                    name: path.display().to_string(),
                    text: read(path).map_err(|e| {
                        let problem = format!("it can't be read ({e})");
                        let remedy = "give a text file with one RULE a line";
                        ConfigError::new(DENY_FILE, path.display(), problem, remedy)
                    })?,
                },
            },
            note: Note::default(),
        })
    });
    rules.collect()
}

impl LoadedPolicy {
    /// Texts of the deny files, with the paths under which they were read.
    pub fn deny_files(&self) -> impl Iterator<Item = (String, String)> {
        let rules = self.rules.iter();
        rules.filter_map(|rule| match &rule.rule {
            RuleText::DenyFile { name, text } => Some((name.clone(), text.clone())),
            RuleText::Match(..) => None,
        })
    }

    /// Text of the deny file that was read under this path.
    pub fn deny_file(&self, path: &str) -> Option<&str> {
        self.rules.iter().find_map(|rule| match &rule.rule {
            RuleText::DenyFile { name, text } if name == path => Some(text.as_str()),
            _ => None,
        })
    }

    /// Compiles the policy. Its rules have the numbers of an only policy.
    ///
    /// # Errors
    /// A rule or a line of a deny file cannot be parsed.
    pub fn compile(&self) -> Result<Policy, ConfigError> {
        let rules = self.rules.iter().map(|LoadedRule { rule, note }| {
            let rule = match rule {
                RuleText::Match(action, text) => parse(*action, text)?,
                RuleText::DenyFile { name, text } => {
                    let parsed = DenyFile::parse(name, text);
                    Rule::DenyFile(Box::new(parsed.map_err(|e| bad_line(DENY_FILE, &e))?))
                }
            };
            let note = note.clone();
            Ok(AnnotatedRule { rule, note })
        });
        let rules: Vec<AnnotatedRule> = rules.collect::<Result<_, _>>()?;
        Ok(Policy::new(self.default, rules).with(self.settings.clone()))
    }
}

fn bad_line(flag: &'static str, error: &DenyFileError) -> ConfigError {
    let DenyFileError { file, line, why } = error;
    let (given, problem) = (format!("{file}:{line}"), why.to_string());
    let remedy = "correct the line, or put a # before it";
    ConfigError::new(flag, given, problem, remedy)
}
