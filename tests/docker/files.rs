//! Reads the files: no more of each format than they use, and what is not known here is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::IgnoredAny;

pub fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

pub fn read(path: &str) -> String {
    std::fs::read_to_string(root(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The part of a Markdown file below a heading, up to the next one.
pub fn stanza(path: &str, heading: &str) -> String {
    let text = read(path);
    let rest = text.split_once(&format!("{heading}\n")).unwrap_or_else(|| panic!("{path}: {heading}")).1;
    rest.split("\n#").next().unwrap().to_owned()
}

pub fn names<'a>(of: impl IntoIterator<Item = &'a String>) -> BTreeSet<String> {
    of.into_iter().cloned().collect()
}

pub fn version(text: &str) -> Vec<u32> {
    text.split('.').map(|part| part.parse().unwrap_or_else(|_| panic!("{text} is no version"))).collect()
}

/// Every file below a folder.
pub fn below(folder: &Path) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
            if entry.is_dir() { folders.push(entry) } else { found.push(entry) }
        }
    }
    found
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compose {
    #[serde(rename = "name")]
    _name: String,
    #[serde(rename = "x-tailer")]
    _tailer: IgnoredAny,
    pub services: BTreeMap<String, Service>,
    pub secrets: BTreeMap<String, SecretFile>,
    pub volumes: BTreeMap<String, Option<IgnoredAny>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    pub image: String,
    pub build: Option<Build>,
    pub entrypoint: Option<Vec<String>>,
    pub command: Option<Vec<String>>,
    pub user: Option<String>,
    #[serde(default)]
    pub environment: BTreeMap<String, Scalar>,
    #[serde(default)]
    pub secrets: Vec<String>,
    #[serde(default)]
    volumes: Vec<String>,
    pub healthcheck: Option<Healthcheck>,
    #[serde(default)]
    pub depends_on: BTreeMap<String, Dependency>,
    pub restart: Option<String>,
    pub stop_grace_period: Option<String>,
    #[serde(default)]
    pub read_only: bool,
    #[serde(default)]
    pub cap_drop: Vec<String>,
    #[serde(default)]
    pub security_opt: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Build {
    pub context: String,
    pub dockerfile: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Healthcheck {
    pub test: Vec<String>,
    #[serde(rename = "interval")]
    _interval: String,
    #[serde(rename = "timeout")]
    _timeout: Option<String>,
    #[serde(rename = "start_period")]
    _start_period: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dependency {
    pub condition: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecretFile {
    pub file: String,
}

/// Compose takes numbers for texts in an environment, but no booleans.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum Scalar {
    Number(i64),
    Text(String),
}

impl Scalar {
    pub fn text(&self) -> String {
        match self {
            Scalar::Number(n) => n.to_string(),
            Scalar::Text(text) => text.clone(),
        }
    }
}

pub struct Mount {
    pub source: String,
    pub target: String,
    pub mode: String,
}

impl Service {
    pub fn mounts(&self) -> Vec<Mount> {
        let mount = |text: &String| {
            let mut parts = text.split(':').map(str::to_owned);
            let mut next = || parts.next().unwrap_or_default();
            Mount { source: next(), target: next(), mode: next() }
        };
        self.volumes.iter().map(mount).collect()
    }
}

impl Compose {
    pub fn read() -> Self {
        serde_saphyr::from_str(&read("docker/compose.yaml")).unwrap_or_else(|e| panic!("compose.yaml: {e}"))
    }
}

/// Instructions with their arguments, continued lines joined.
pub struct Dockerfile(Vec<(String, String)>);

impl Dockerfile {
    pub fn read() -> Self {
        let text = read("docker/Dockerfile");
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with('#')).collect();
        let instructions = lines.join("\n").replace("\\\n", " ");
        let instructions = instructions.lines().filter(|line| !line.trim().is_empty()).map(|line| {
            let (name, arguments) = line.split_once(' ').unwrap_or_else(|| panic!("Dockerfile: {line}"));
            let known = ["FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "ENTRYPOINT", "CMD"];
            assert!(known.contains(&name), "Dockerfile: {line}");
            (name.to_owned(), arguments.trim().to_owned())
        });
        Dockerfile(instructions.collect())
    }

    fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(n, _)| n == name).map(|(_, arguments)| arguments.as_str())
    }

    pub fn stages(&self) -> Vec<String> {
        self.all("FROM").map(|from| from.split(' ').next().unwrap().to_owned()).collect()
    }

    /// What is copied from the build context.
    pub fn copied(&self) -> Vec<String> {
        let mut found = Vec::new();
        for copy in self.all("COPY") {
            let mut words: Vec<&str> = copy.split_whitespace().collect();
            let target = words.pop().unwrap();
            if let Some(stage) = words.iter().find_map(|word| word.strip_prefix("--from=")) {
                // From a stage: something in it must have made the file.
                assert!(self.all("FROM").any(|from| from.ends_with(&format!(" AS {stage}"))), "{stage}");
                assert!(self.all("RUN").any(|run| run.ends_with(words[1])), "nothing makes {}", words[1]);
                assert_eq!(self.words("ENTRYPOINT"), [target]);
            } else {
                // Into the working directory, under the same name.
                assert!(target == "./" || words == [target], "COPY {copy}");
                found.extend(words.into_iter().map(str::to_owned));
            }
        }
        found
    }

    /// The one instruction of that name in the last stage, which the image ends up with.
    pub fn words(&self, name: &str) -> Vec<String> {
        let last = self.0.iter().rposition(|(n, _)| n == "FROM").unwrap();
        let mut found = self.0[last..].iter().filter(|(n, _)| n == name);
        let (_, arguments) = found.next().unwrap_or_else(|| panic!("Dockerfile: no {name}"));
        assert!(found.next().is_none(), "Dockerfile: two {name}");
        // With brackets it is JSON and goes to the program; without, a shell would be needed.
        match name {
            "ENTRYPOINT" | "CMD" => serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{name}: {e}")),
            _ => arguments.split_whitespace().map(str::to_owned).collect(),
        }
    }

    /// The words of the `cargo build`.
    pub fn cargo_build(&self) -> Vec<String> {
        let command = self.all("RUN").flat_map(|run| run.split("&&")).find_map(|part| {
            let at = part.find("cargo build")?;
            Some(part[at..].split_whitespace().map(str::to_owned).collect())
        });
        command.expect("a cargo build")
    }
}

/// Whether `.dockerignore` keeps a path out of the build: the last pattern that matches decides.
pub fn ignored(path: &str) -> bool {
    let mut out = false;
    for line in read(".dockerignore").lines().filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let (pattern, keeps_out) = line.strip_prefix('!').map_or((line, true), |rest| (rest, false));
        let plain = !pattern.contains(['*', '?', '[']);
        assert!(plain || pattern == "*", ".dockerignore: {line}: teach this test the pattern");
        let matches = pattern == "*"
            || path.strip_prefix(pattern).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        if matches {
            out = keeps_out;
        }
    }
    out
}
