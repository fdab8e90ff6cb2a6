//! Parses the output of `cargo test` and sums up the results.
//!
//! A test that can't run here prints `skipped: <test>: <why>` to the real stderr and returns;
//! libtest counts it as passed, so it is subtracted from the passed tests. Tests marked `#[ignore]`
//! count as skipped too, unless their reason says that they are no tests of a run: measurements,
//! child processes that another test starts, and what is done for a release. A test of another
//! project's program that nobody named says `left out: <test>: <why>`: it is listed, and counts
//! neither as passed nor as skipped. A suite that was started but printed no result has crashed, and
//! counts as a failure.

use std::fmt;

/// Results of all suites that ran.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    suites: Vec<Suite>,
}

/// Number of tests by outcome.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    pub(crate) skipped: u32,
}

/// One test binary, or the doc tests of one crate.
#[derive(Debug, Default)]
struct Suite {
    name: String,
    /// Results by libtest, one entry for each `test result:` line.
    results: Vec<LibtestResult>,
    /// Skipped tests, each as `<test>: <why>`.
    skips: Vec<String>,
    /// Tests of programs that nobody named, likewise.
    left_out: Vec<String>,
    /// Number of ignored tests that are no tests of a run.
    aside: u32,
    failures: Vec<String>,
}

#[derive(Debug, PartialEq)]
struct LibtestResult {
    passed: u32,
    failed: u32,
    ignored: u32,
    seconds: f64,
}

impl Summary {
    /// Processes one line of the output of cargo or of a test binary.
    pub(crate) fn read_line(&mut self, line: &str) {
        if let Some(name) = suite_name(line) {
            self.suites.push(Suite {
                name,
                ..Suite::default()
            });
            return;
        }
        let Some(suite) = self.suites.last_mut() else {
            return;
        };
        if let Some(result) = libtest_result(line) {
            suite.results.push(result);
        } else if let Some(failure) = failure(line) {
            suite.failures.push(failure.to_owned());
        } else if let Some(skip) = said_of_test(line, "skipped: ") {
            suite.skips.push(skip.to_owned());
        } else if let Some(left_out) = said_of_test(line, "left out: ") {
            suite.left_out.push(left_out.to_owned());
        } else if is_no_test(line) {
            suite.aside += 1;
        }
    }

    /// Adds a suite of one test that cargo did not run.
    pub(crate) fn add(&mut self, name: &str, passed: bool, seconds: f64) {
        self.suites.push(Suite {
            name: name.to_owned(),
            results: vec![LibtestResult {
                passed: u32::from(passed),
                failed: u32::from(!passed),
                ignored: 0,
                seconds,
            }],
            ..Suite::default()
        });
    }

    /// Returns the sums over all suites.
    pub(crate) fn total(&self) -> Count {
        self.suites
            .iter()
            .map(Suite::count)
            .fold(Count::default(), |sum, suite| Count {
                passed: sum.passed + suite.passed,
                failed: sum.failed + suite.failed,
                skipped: sum.skipped + suite.skipped,
            })
    }
}

impl Suite {
    fn count(&self) -> Count {
        let sum = |of: fn(&LibtestResult) -> u32| self.results.iter().map(of).sum::<u32>();
        let number = |tests: &Vec<String>| u32::try_from(tests.len()).unwrap_or(u32::MAX);
        let said = number(&self.skips);
        let not_run = said.saturating_add(number(&self.left_out));
        Count {
            passed: sum(|r| r.passed).saturating_sub(not_run),
            failed: sum(|r| r.failed) + u32::from(self.has_crashed()),
            skipped: sum(|r| r.ignored).saturating_sub(self.aside) + said,
        }
    }

    fn has_crashed(&self) -> bool {
        self.results.is_empty()
    }
}

impl fmt::Display for Summary {
    /// Formats a table of the suites, the skipped and failed tests, and the sums alone on the last
    /// line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows: Vec<_> = self
            .suites
            .iter()
            .map(|suite| (suite, suite.count()))
            .filter(|(_, count)| *count != Count::default())
            .collect();
        let width = rows
            .iter()
            .map(|(suite, _)| suite.name.len())
            .max()
            .unwrap_or(0)
            .max(5);
        writeln!(f, "{:width$}  passed  failed  skipped  seconds", "suite")?;
        for (
            suite,
            Count {
                passed,
                failed,
                skipped,
            },
        ) in &rows
        {
            let seconds: f64 = suite.results.iter().map(|result| result.seconds).sum();
            let name = &suite.name;
            write!(
                f,
                "{name:width$}  {passed:6}  {failed:6}  {skipped:7}  {seconds:7.2}"
            )?;
            writeln!(f, "{}", if suite.has_crashed() { "  crashed" } else { "" })?;
        }
        for (suite, _) in &rows {
            for skip in &suite.skips {
                writeln!(f, "skipped: {skip}")?;
            }
            for left_out in &suite.left_out {
                writeln!(f, "left out: {left_out}")?;
            }
        }
        for (suite, _) in &rows {
            for failure in &suite.failures {
                writeln!(f, "failed: {}: {failure}", suite.name)?;
            }
        }
        let Count {
            passed,
            failed,
            skipped,
        } = self.total();
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// Returns the suite of a line `     Running unittests src/lib.rs
/// (target/debug/deps/name-0123456789abcdef)` or `   Doc-tests name`.
fn suite_name(line: &str) -> Option<String> {
    let line = line.trim_start();
    if let Some(name) = line.strip_prefix("Doc-tests ") {
        return Some(format!("{name} (doc)"));
    }
    let (source, binary) = line
        .strip_prefix("Running ")?
        .strip_suffix(')')?
        .split_once(" (")?;
    let file = binary.rsplit('/').next()?;
    let (name, _hash) = file.rsplit_once('-')?;
    match source.strip_prefix("unittests ") {
        Some(source) => Some(format!("{name} ({source})")),
        None => Some(source.to_owned()),
    }
}

/// Parses a line `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out;
/// finished in 0.01s`.
fn libtest_result(line: &str) -> Option<LibtestResult> {
    let (_, figures) = line.split_once("test result: ")?;
    let (_ok, figures) = figures.split_once(". ")?;
    let figure = |label: &str| {
        let words = figures
            .split("; ")
            .find_map(|part| part.strip_suffix(label))?;
        words.trim().parse().ok()
    };
    let seconds = figures
        .split_once("finished in ")
        .and_then(|(_, time)| time.trim_end().strip_suffix('s')?.parse().ok())
        .unwrap_or(0.0);
    Some(LibtestResult {
        passed: figure("passed")?,
        failed: figure("failed")?,
        ignored: figure("ignored")?,
        seconds,
    })
}

/// Whether a line is about an ignored test that is none of a run: `test cost ... ignored, a
/// measurement`.
fn is_no_test(line: &str) -> bool {
    let elsewhere = ["the child of ", "of a release: "];
    line.split_once(" ... ignored, ")
        .is_some_and(|(_, reason)| {
            reason == "a measurement" || elsewhere.iter().any(|start| reason.starts_with(start))
        })
}

/// Returns the test of a line `---- name stdout ----`, the heading of a failed test's output.
fn failure(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

/// Returns the rest of a line `<begin><test>: <why>`, also after the `test <test> ... ` with which
/// libtest begins the line.
fn said_of_test<'a>(line: &'a str, begin: &str) -> Option<&'a str> {
    let line = match line.split_once(" ... ") {
        Some((begun, rest)) if begun.starts_with("test ") => rest,
        _ => line,
    };
    let said = line.trim_start().strip_prefix(begin)?;
    said.contains(": ").then_some(said)
}

#[cfg(test)]
#[path = "summary_test.rs"]
mod tests;
