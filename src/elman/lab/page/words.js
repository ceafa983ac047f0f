// Every word on the page, in English and in Chinese. English is the key.

const CHINESE = {
  "Runs": "运行", "New": "新建", "Train": "训练", "Microscope": "显微镜", "Inside": "模型内部", "Write": "写作",
  "Start": "开始", "Start training": "开始训练", "Pause": "暂停", "Resume": "继续", "Stop": "停止",
  "Language": "语言", "Dark": "深色", "Light": "浅色", "No runs yet": "还没有运行",
  "Train a small network on your own text, now.": "现在就用你自己的文本训练一个小网络。",
  "Paste a text, drop a file anywhere on this page, or pick a corpus.": "粘贴文本、把文件拖到页面任意处，或选择一个语料库。",
  "Paste some text here…": "在此粘贴文本……", "or a corpus": "或选择语料库", "my own text": "我自己的文本",
  "model": "模型", "hidden units": "隐藏单元", "window": "窗口", "passes": "遍数", "auto": "自动",
  "learning rate": "学习率", "clip": "裁剪", "carry": "回传方式", "memory": "内存", "history": "历史",
  "Change while it runs": "边训练边修改", "Apply": "应用",
  "each change is a marker on the curve and a line in the run's record": "每次修改都会在曲线上留下标记，并写入运行记录",
  "queued": "排队中", "starting": "启动中", "running": "训练中", "paused": "已暂停", "stopped": "已停止",
  "scoring": "评分中", "ended": "已完成", "failed": "失败", "elsewhere": "在别处训练",
  "loss": "损失", "training": "训练", "held out": "留出集", "gradient norm": "梯度范数",
  "step": "步", "tokens per second": "词元/秒", "training perplexity": "训练困惑度", "held-out perplexity": "留出困惑度",
  "progress": "进度", "What it writes now": "它现在写的", "after {0} updates": "{0} 次更新之后",
  "How well it predicts the next token, while it learns; dashed: counting models on the same held-out text.":
    "学习过程中预测下一个词元的水平；虚线：同一留出文本上的计数模型。",
  "The length of the gradient at each update, and where it is clipped.": "每次更新的梯度长度，以及裁剪的位置。",
  "How far each loss reaches back through the states before it.": "每个损失沿着之前的状态能回溯多远。",
  "Columns are losses, rows are lags: bright is where the gradient still arrives. Below the staircase the truncation cuts it off.":
    "每列是一个损失，每行是一个滞后：越亮，到达的梯度越大。阶梯线以下的部分被截断丢弃。",
  "lag": "滞后", "losses": "损失", "lags": "滞后",
  "cut off": "被截断", "window that keeps 90 %": "保留 90% 的窗口", "window that keeps 99 %": "保留 99% 的窗口",
  "half lies within": "一半位于", "looking …": "正在观察……", "at most": "至多",
  "half of the gradient lies within {0}, 90 % within {1} steps; a window of {2} keeps {3}": "一半的梯度位于 {0} 步之内，90% 位于 {1} 步之内；长度为 {2} 的窗口保留 {3}", "saturated": "饱和", "steps": "步", "at least": "至少",
  "Truncation window": "截断窗口", "Train on with this window": "用这个窗口继续训练",
  "drag in the picture, or use the slider": "在图中拖动，或使用滑块",
  "Hover or focus a loss to see which characters its gradient reaches.": "悬停或聚焦某个损失，查看它的梯度到达哪些字符。",
  "loss of {0}: {1} nats": "{0} 的损失：{1} 奈特",
  "Carries side by side": "各种回传方式对比",
  "The same gradient by every carry, against the full one.": "用每种回传方式计算同一梯度，与完整梯度比较。",
  "bias": "偏差", "noise": "噪声", "cosine": "余弦", "states kept": "保留状态", "Compare": "比较",
  "Spectrum of the Jacobian products": "雅可比连乘的谱",
  "How many directions survive k steps back.": "回溯 k 步之后还剩多少个方向。",
  "direction": "方向", "singular value": "奇异值", "Measure": "测量",
  "{0} of {1} units saturated, {2} never move; spectral radius {3}": "{1} 个单元中 {0} 个饱和，{2} 个不动；谱半径 {3}",
  "Any text, coloured by what the model makes of it.": "任意文本，按模型的看法着色。",
  "Text": "文本", "Surprise": "惊讶度", "Unit": "单元", "Show": "显示",
  "nats": "奈特", "mean": "平均",
  "Which units follow …": "哪些单元跟随……",
  "Units whose activation is most correlated with something in the text.": "激活与文本中某种特征最相关的单元。",
  "inside quotes": "引号内", "line length": "行长", "bracket depth": "括号深度", "capitals": "大写字母", "a pattern:": "一个模式：",
  "Search": "搜索", "Click a token: what the model expected there, beside Kneser–Ney; and where its state was alike.":
    "点击一个词元：模型在此处的预期（与 Kneser–Ney 并列），以及状态相似的位置。",
  "What comes next": "接下来是什么", "this model": "本模型", "Similar places": "相似位置",
  "Text that the model writes, token by token.": "模型逐词元写出的文本。",
  "Prompt": "开头", "temperature": "温度", "top-k": "top-k", "top-p": "top-p", "length": "长度", "seed": "种子",
  "Click a token to see what else it could have been, and to branch from there.": "点击一个词元，看它还可能是什么，并从那里分支。",
  "Branches": "分支", "Instead of {0}": "代替 {0}", "Do it again": "再做一次", "Copy": "复制", "Copied": "已复制",
  "Figures": "图", "compare": "对比", "Open": "打开", "drop the file": "松开以放入文件",
  "forecast": "预测", "series": "序列", "Errors by horizon": "按步数的误差",
  "The series, the forecast, and the interval that should hold the truth so often.": "序列、预测，以及应以相应概率包含真值的区间。",
  "Past windows, each forecast from what came before it.": "过去的窗口，每个都用它之前的数据预测。",
  "no weights yet": "还没有权重",
  "changed": "已修改", "no change": "没有变化", "The page lost its server; it tries again.": "页面与服务器断开，正在重试。",
  "This model carries nothing through time.": "该模型不随时间传递任何东西。",
  "perplexity": "困惑度", "tokens": "词元", "byte": "字节", "char": "字符", "word": "词", "bpe": "子词（bpe）",
  "pausing …": "正在暂停……", "stopping …": "正在停止……", "going on …": "正在继续……", "Apply and go on": "应用并继续",
  "would be cut off": "会被截断", "{0} pictures a second": "每秒 {0} 幅图", "one picture in {0} s: all cores are busy": "每 {0} 秒一幅图：所有核心都很忙",
  "Carry {0} does not cut at the edges of windows: the dashed line is where truncation would.": "回传方式 {0} 不在窗口边缘截断；虚线是截断时会切开的位置。",
  "“{0}” is too large for the page: at most {1} MiB. `elman train FILE` takes texts of any size; its run opens here, too.":
    "“{0}”对本页面来说太大：最多 {1} MiB。`elman train FILE` 可处理任意大小的文本，其运行也会显示在这里。",
  "“{0}” is a folder: drop the text files in it.": "“{0}”是文件夹：请拖入其中的文本文件。", "“{0}” cannot be read: {1}": "无法读取“{0}”：{1}",
  "Process {0} trains it, which this page did not start: it is paused, stopped and changed there. What it tells is shown here.":
    "它由进程 {0} 训练，不是本页面启动的：请在那里暂停、停止或修改。这里显示它的进展。",
  "The process that trained it is gone. It can go on here, from where it was last saved.": "训练它的进程已经不在。可以在这里从上次保存处继续。",
  "Another process trains this run: the picture is of the weights that it saved last.": "该运行由另一个进程训练：图中是它上次保存的权重。",
  "There is no run of this name here: it was moved, renamed or deleted. If it comes back, it is shown again.":
    "这里没有叫这个名字的运行：它已被移动、改名或删除。若它回来，会重新显示。",
  "Tap a loss to see which characters its gradient reaches.": "点按某个损失，查看它的梯度到达哪些字符。", "or a file": "或选择文件",
  "units": "单元", "none": "无", "stored": "全部保留",
};

let language = localStorage.getItem("elman-language") || (navigator.language.startsWith("zh") ? "zh" : "en");

export function t(english, ...values) {
  const text = language === "zh" ? CHINESE[english] ?? english : english;
  return text.replace(/\{(\d)\}/g, (_, i) => values[i]);
}

export const spoken = () => language;

export function speak(other) {
  language = other;
  localStorage.setItem("elman-language", other);
  document.documentElement.lang = other;
}

speak(language);
